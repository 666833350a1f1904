"""All that touches files, maps and locks."""
