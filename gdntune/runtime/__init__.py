"""What an engine calls. Imports nothing of tuning or reports."""
