"""Policies, autograd's side of a step, what is told of a step, and trees of tensors."""
