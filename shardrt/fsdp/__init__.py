"""The FSDP runtime: when parameters are gathered and freed, and when gradients are reduced. `shardrt` has the public names."""
