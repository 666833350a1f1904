"""The HTTP layer: a store served to other processes and machines.

Used by the command line and by ASGI servers, always under the name `expstore.api`; it never
touches a file of a store, only the public buffer.
"""
