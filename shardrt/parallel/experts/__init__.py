"""Experts on several ranks: the style, the modules, and the even load."""
