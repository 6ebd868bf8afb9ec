"""Benchmarks, each a script of its own."""
