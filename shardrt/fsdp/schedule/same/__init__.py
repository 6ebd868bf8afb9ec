"""What ranks have alike, and is compared: batches, buffers, weights."""
