"""What is asked: options, the search over settings, and the report."""
