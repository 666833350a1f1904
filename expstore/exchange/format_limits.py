"""Descriptions of what each export format cannot store.

Used by the formats, which report it with every export, and by the command's help. It imports nothing.
"""

#: What no format stores, and what each format does not store in addition.
LOST_BY_ALL = "row ids, how often rows were sampled, the number of the next draw, layouts, versions"
_OF_FLAT_FORMATS = "the order of rows of different episodes; fields of variable length, which it refuses"
LOSSES = {
    "arrow": "",
    "hdf5": f"priorities, times, sources, trajectory ids, facts about episodes, specs; {_OF_FLAT_FORMATS}",
    "minari": f"priorities, times, sources, trajectory ids, specs except spaces; {_OF_FLAT_FORMATS}",
    "npz": f"priorities, times, sources, trajectory ids, facts about episodes, specs; {_OF_FLAT_FORMATS}",
    "parquet": "",
}


def describe_losses(form: str) -> str:
    """Return a description of what a format cannot store."""
    return "; ".join(filter(None, [LOST_BY_ALL, LOSSES[form]]))
