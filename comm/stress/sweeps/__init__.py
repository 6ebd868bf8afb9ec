"""Sweeps over sizes: sweep times collectives, peers what passes between two ranks, compute what a rank does alone."""
