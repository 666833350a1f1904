"""The formats of files on disk."""
