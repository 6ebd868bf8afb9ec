"""Policies, hooks in the autograd graph, events of a step, trees of tensors, and the two levels of a mesh axis."""
