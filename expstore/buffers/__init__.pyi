from expstore.buffers.consumer import Consumer as Consumer
from expstore.buffers.ensemble import ReplayBufferEnsemble as ReplayBufferEnsemble
from expstore.buffers.hindsight import HERReplayBuffer as HERReplayBuffer
from expstore.buffers.hindsight import HindsightStrategy as HindsightStrategy
from expstore.buffers.prioritized import PrioritizedReplayBuffer as PrioritizedReplayBuffer
from expstore.buffers.prioritized import (
    TensorDictPrioritizedReplayBuffer as TensorDictPrioritizedReplayBuffer,
)
from expstore.buffers.replay_buffer import ReplayBuffer as ReplayBuffer
from expstore.buffers.sample_units import SampleUnit as SampleUnit
from expstore.buffers.sample_units import Sequence as Sequence
from expstore.buffers.sample_units import Transition as Transition
from expstore.buffers.tensordict import TensorDictReplayBuffer as TensorDictReplayBuffer
from expstore.buffers.updates import ConditionalUpdateResult as ConditionalUpdateResult
