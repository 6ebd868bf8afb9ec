"""DTensor: the class, its making from whole tensors (distribute), and how operations see it (operands)."""
