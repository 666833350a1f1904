"""Values and rules that use no files."""
