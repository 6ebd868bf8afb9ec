"""What users call: `fully_shard`, the class of a sharded module, functions on sharded modules."""
