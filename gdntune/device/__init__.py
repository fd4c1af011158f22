"""What a GPU or CPU is, and how its time is read."""
