"""SQL that is not trusted, in a process of its own."""
