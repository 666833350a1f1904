"""Episodes: which rows belong to which episode, at which step."""
