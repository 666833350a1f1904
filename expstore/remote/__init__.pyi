from expstore.remote.client import RemoteReplayBuffer as RemoteReplayBuffer
from expstore.remote.transport import Retries as Retries
