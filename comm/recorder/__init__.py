"""The flight recorder: the last calls of a rank, its dumps, and their merge (python -m shardrt.comm.recorder)."""
