"""Files and folders of checkpoints, on a disk or in a store, which are there whole or not at all."""
