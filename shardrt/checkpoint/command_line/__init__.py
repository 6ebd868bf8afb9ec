"""`python -m shardrt.checkpoint`: inspect, verify and convert, without ranks."""
