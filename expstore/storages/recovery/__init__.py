"""What the journal of a store says, and what a crash has left."""
