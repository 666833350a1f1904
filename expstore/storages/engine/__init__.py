"""The writer of a store on disk."""
