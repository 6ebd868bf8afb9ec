"""Optimizer steps on shards: element by element, by whole matrices, and the state of both."""
