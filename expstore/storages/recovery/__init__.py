"""What the journal says, folded."""
