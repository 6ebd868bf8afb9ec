"""Memory that ranks of a node share: for small calls, for chunks of large ones, and for one copy of the parameters."""
