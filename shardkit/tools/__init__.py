"""What is behind the command line: each command's work, as functions that return data."""
