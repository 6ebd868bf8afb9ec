"""Writes a state to files: who writes what, where it goes, and the thread that writes it."""
