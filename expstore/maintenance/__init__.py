"""Look at stores, hold their files against one another, and repair what can be repaired.

Used by the command line and by programs that keep stores for long. Only `repair` changes a file, and
`upgrade`, which is not gathered here because it loads DuckDB.
"""

from expstore.maintenance.findings import Finding
from expstore.maintenance.inspection import Survey, Writer, survey
from expstore.maintenance.repair import Outcome, repair
from expstore.maintenance.verify import verify

__all__ = ["Finding", "Outcome", "Survey", "Writer", "repair", "survey", "verify"]
