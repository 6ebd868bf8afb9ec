"""Comparison of what several ranks must have alike. The public name is `shardrt.check_replicas`."""
