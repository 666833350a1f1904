"""A served store as a buffer."""
