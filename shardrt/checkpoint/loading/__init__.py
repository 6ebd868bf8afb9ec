"""Reads the contents of a checkpoint into the memory of a state, on any number of ranks."""
