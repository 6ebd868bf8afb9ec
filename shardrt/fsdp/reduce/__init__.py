"""How the gradients of a group become sharded ones: packed, reduced and published."""
