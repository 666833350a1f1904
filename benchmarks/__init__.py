"""Benchmarks of expstore and other replay buffers; see README.md.

Run them as scripts. The library does not import them, and they write only to their own scratch folders.
"""
