"""What is saved and loaded: values and their names."""
