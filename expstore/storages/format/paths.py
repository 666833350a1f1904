"""Names of the files and folders of a store.

docs/format.md describes the content of each.
"""

from __future__ import annotations

from pathlib import Path

#: Values that were added to rows after they were written.
ANNOTATIONS = "annotations"
CHECKSUMS = "checksums"
COLUMNS = "columns"
INDEX = "index.duckdb"
JOURNAL = "journal"
#: Locked shared while a draw that leases its rows is recorded, and alone while a policy deletes rows.
LEASES = "LEASES"
LOCK = "LOCK"
LOG = "episodes.log"
REDO = "redo"
#: Former ids of rows, once rows got new ones.
RENUMBERED = "renumbered"
SEGMENTS = "segments"
#: In a store that is shipped to an object storage: the claims under which its content was shipped.
SHIPPED = "SHIPPED"
#: While a command asks the writer to ship the store: where the command listens.
SHIP_REQUEST = "SHIP_REQUEST"
STATE = "STATE"
#: In a folder that is a snapshot, which has no writer.
VERSION = "version.json"
#: In a snapshot: the store's own checksums when it was made; equal checksums mean equal rows.
ORIGIN = "origin"
#: Exists while a repair truncates the journal: nothing else may open the store.
REPAIR = "REPAIR"


def index_path(store: Path) -> Path | None:
    r"""Return the absolute path of a store's index; None: in memory, because DuckDB cannot open the path.

    DuckDB takes what follows `?` for options and `\` for `/`, and requires UTF-8. It follows links first. A
    relative path could begin with a name that DuckDB gives another meaning, such as `:memory:`.
    """
    path = store.absolute() / INDEX
    for text in (str(path), str(path.resolve())):
        try:
            text.encode()
        except UnicodeEncodeError:
            return None
        if "?" in text or "\\" in text:
            return None
    return path
