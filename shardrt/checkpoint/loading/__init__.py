"""From the contents of a checkpoint to the memory of a state, on any number of ranks."""
