"""Attention over parts of a sequence: in a ring (attention), by heads (ulysses), and the local kernels."""
