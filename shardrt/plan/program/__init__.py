"""What is run: a job, and the program that a preset, a configuration or a factory makes for it."""
