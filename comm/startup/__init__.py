"""How a process becomes a rank (bootstrap), and goes on without lost ones (recovery); dry has ranks that do not exist."""
