"""Mutated files of every format that expstore reads: each is read, or raises an error of expstore."""
