"""Compiled objects: compile, keep, load."""
