"""The version of shardrt, here so that `comm` needs nothing of what lies above it."""

__version__ = "0.2.0"
