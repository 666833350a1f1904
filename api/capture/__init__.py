"""Calls of agents to a language model, passed through and stored as episodes."""
