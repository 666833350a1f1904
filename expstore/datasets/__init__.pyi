from expstore.datasets.atari_dqn import AtariDQNReader as AtariDQNReader
from expstore.datasets.d4rl import D4RLReader as D4RLReader
from expstore.datasets.episode import Episode as Episode
from expstore.datasets.episode import Part as Part
from expstore.datasets.episode import Reader as Reader
from expstore.datasets.importer import import_dataset as import_dataset
from expstore.datasets.roboset import RobosetReader as RobosetReader
