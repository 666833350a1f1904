from expstore.on_ray import cluster as ray
