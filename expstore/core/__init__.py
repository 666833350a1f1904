"""Values and rules that touch no file."""
