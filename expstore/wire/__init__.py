"""Rows between processes."""
