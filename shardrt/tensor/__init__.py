"""Sharded tensors: `DTensor`, its placements, redistribution, and the operations that are defined on it."""
