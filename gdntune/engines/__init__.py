"""Ours in the place of an engine's own decode functions: plug-ins, hooks and drop-ins."""
