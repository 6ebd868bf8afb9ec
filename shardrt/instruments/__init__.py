"""What a user reads while training: metrics, and the progress bar."""
