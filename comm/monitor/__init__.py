"""Detects that a rank has failed or hangs, and ends the job. The collectives do not depend on it."""
