"""The checks of scripts/gpu_check.py, by what they look at."""
