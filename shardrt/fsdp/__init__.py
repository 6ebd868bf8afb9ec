"""What is gathered when, freed when, reduced when. The public names are those of `shardrt`."""
