"""Run untrusted SQL in a separate process."""
