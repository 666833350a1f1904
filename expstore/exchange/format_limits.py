"""Descriptions of what each export format cannot store.

Used by the formats, which report it with every export, and by the command's help. It imports nothing.
"""

#: What no format stores, and what each format does not store in addition.
LOST_BY_ALL = "row ids, how often rows were sampled, the number of the next draw, layouts, versions"
_VARIABLE = "fields of variable length, which it refuses"
_OF_FLAT_FORMATS = f"the order of rows of different episodes; {_VARIABLE}"
LOSSES = {
    "arrow": "",
    "hdf5": f"priorities, times, sources, trajectory ids, facts about episodes, specs; {_OF_FLAT_FORMATS}",
    "minari": f"priorities, times, sources, trajectory ids, specs except spaces; {_OF_FLAT_FORMATS}",
    "npz": f"priorities, times, sources, trajectory ids, facts about episodes, specs; {_OF_FLAT_FORMATS}",
    "parquet": "",
    "zarr": f"sources, trajectory ids, status and facts of episodes, specs; {_VARIABLE}",
}


def describe_losses(form: str) -> str:
    """Return a description of what a format cannot store."""
    return "; ".join(filter(None, [LOST_BY_ALL, LOSSES[form]]))
