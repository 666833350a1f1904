"""The index in DuckDB."""
