from expstore.cluster.buffer import ShardedReplayBuffer as ShardedReplayBuffer
from expstore.on_ray import cluster as ray
