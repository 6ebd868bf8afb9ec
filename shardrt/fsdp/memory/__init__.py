"""Buffers, the host's pool of memory, and what the groups of a root share."""
