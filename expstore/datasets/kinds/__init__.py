"""The kinds of data sets: one module for each format, with its reader and its `Kind`.

`expstore.datasets.registry` finds the modules of this package; nothing else lists them.
"""
