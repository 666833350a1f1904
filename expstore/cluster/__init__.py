"""Several served stores behind one buffer: `expstore.connect` of a list of addresses."""
