"""Load, check and break the communication layer: the command line `shardrt-stress`."""
