"""Parameters, how they lie on the ranks, and what the modules see of them."""
