"""Tests that ship with the library: what every storage must hold, for storages of your own.

Subclass `StorageSuite` in a test module and say what your storage can do; pytest runs the rest. Nothing here
imports pytest or Hypothesis before a test asks for it.
"""

from expstore.testing.suite import StorageSuite

__all__ = ["StorageSuite"]
