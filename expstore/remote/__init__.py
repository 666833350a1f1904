"""The client of a served store."""
