"""Tests that every storage must pass, for storages of your own.

Subclass `StorageSuite` in a test module and declare what your storage can do; pytest runs the tests. pytest
and Hypothesis are imported when a test needs them.
"""

from expstore.testing.suite import StorageSuite

__all__ = ["StorageSuite"]
