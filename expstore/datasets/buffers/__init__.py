"""The data set classes under TorchRL's names: replay buffers over the stores of data sets.

Used through `expstore.datasets`. There is one module per class.
"""
