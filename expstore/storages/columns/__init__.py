"""The kinds of columns."""
