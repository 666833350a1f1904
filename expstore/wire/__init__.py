"""The formats in which rows travel between processes."""
