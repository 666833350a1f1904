from expstore.collectors.gymnasium import Collector as Collector
from expstore.collectors.gymnasium import TransitionSink as TransitionSink
