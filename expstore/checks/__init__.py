"""Look at stores, hold their files against one another, and repair what can be repaired.

Used by the command line and by programs that keep stores for long. Only `repair` and `upgrade` change files.
"""

from expstore.checks.findings import Finding
from expstore.checks.repair import Outcome, repair
from expstore.checks.survey import Survey, Writer, survey
from expstore.checks.upgrade import Upgrade, upgrade
from expstore.checks.verify import verify

__all__ = ["Finding", "Outcome", "Survey", "Upgrade", "Writer", "repair", "survey", "upgrade", "verify"]
