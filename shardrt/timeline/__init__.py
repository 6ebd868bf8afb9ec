"""Timelines of training steps, for Perfetto."""
