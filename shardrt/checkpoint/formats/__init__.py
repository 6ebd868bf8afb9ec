"""The bytes of checkpoints: file formats, without knowledge of ranks or of a program's state."""
