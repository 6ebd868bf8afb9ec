"""What a group of ranks does: communicator has the collectives, control the agreements, mesh the groups of a mesh."""
