"""What the memory of a process consists of."""
