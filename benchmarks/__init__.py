"""Measurements of expstore beside other replay buffers; see README.md.

Run as scripts. Nothing in the library imports this, and it never writes outside its own scratch folder.
"""
