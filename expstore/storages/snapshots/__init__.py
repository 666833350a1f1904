"""Snapshots of a store."""
