"""Which rows make an episode."""
