"""How a tensor lies over ranks: `DTensor`, its placements, and what operations do with it."""
