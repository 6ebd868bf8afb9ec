"""Files and folders of checkpoints, on a disk or in a remote store. A checkpoint is there whole or not at all."""
