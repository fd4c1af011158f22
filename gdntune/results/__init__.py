"""What sweeps left: journals, tables, and what follows from them. Knows nothing of how things look."""
