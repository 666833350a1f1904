"""The SQL index of a store, in DuckDB, and SQL queries over the store's rows."""
