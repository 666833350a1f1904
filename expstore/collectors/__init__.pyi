from expstore.collectors.collector import Collector as Collector
from expstore.collectors.lanes import LaneCollector as LaneCollector
from expstore.collectors.lanes import TransitionSink as TransitionSink
