"""The sweep: what is tried, where it runs, and how it is timed."""
