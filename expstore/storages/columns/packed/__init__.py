"""Packed columns."""
