"""The bytes of checkpoints. This room knows no ranks, and no state of a program."""
