"""Variable-length columns, in Arrow segments."""
