"""Benchmark, soak and fault injection for the communication layer: the command `shardrt-stress`."""
