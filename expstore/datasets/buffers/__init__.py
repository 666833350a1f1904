"""The data set classes, under TorchRL's names: replay buffers over the store of a data set.

Used through `expstore.datasets`. A module per class.
"""
