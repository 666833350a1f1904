"""Shards of a cluster on Ray; programs use it as `expstore.cluster.ray`."""
