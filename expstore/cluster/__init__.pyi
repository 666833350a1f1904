from expstore.cluster import ray as ray
