"""Inspect, check and repair stores.

Used by the command line and by programs that manage stores. Only `repair` changes files.
"""

from expstore.maintenance.findings import Finding
from expstore.maintenance.inspection import Survey, Writer, survey
from expstore.maintenance.repair import Outcome, repair
from expstore.maintenance.verify import verify

__all__ = ["Finding", "Outcome", "Survey", "Writer", "repair", "survey", "verify"]
