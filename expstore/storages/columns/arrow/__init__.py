"""Columns of variable length, in Arrow segments."""
