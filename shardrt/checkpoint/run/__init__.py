"""A training run that resumes."""
