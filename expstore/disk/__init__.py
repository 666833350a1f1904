"""Access to files, maps and locks."""
