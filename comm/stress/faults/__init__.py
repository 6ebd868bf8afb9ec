"""Faults that are injected into jobs: what a rank does, how its job has to end, and the report."""
