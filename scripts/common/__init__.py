"""Shared by several scripts."""
