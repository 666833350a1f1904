from expstore.writers.writers import ImmutableDatasetWriter as ImmutableDatasetWriter
from expstore.writers.writers import RoundRobinWriter as RoundRobinWriter
from expstore.writers.writers import TensorDictMaxValueWriter as TensorDictMaxValueWriter
from expstore.writers.writers import TensorDictRoundRobinWriter as TensorDictRoundRobinWriter
from expstore.writers.writers import Writer as Writer
from expstore.writers.writers import WriterEnsemble as WriterEnsemble
