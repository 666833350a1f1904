"""Read the journal of a store, and recover the store after a crash."""
