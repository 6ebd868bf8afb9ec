"""A process beside each rank, which ends the job where the rank cannot; `__main__.py` describes it. It imports no torch."""
