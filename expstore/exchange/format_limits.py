"""Descriptions of what each export format cannot store.

Used by the formats, which report it with every export, and by the command's help. It imports nothing.
"""

__all__ = ["LOSSES", "LOST_BY_ALL", "describe_losses"]

#: What no format stores, and what each format does not store in addition.
LOST_BY_ALL = "ids, how often rows were sampled, the number of the next draw, layouts, snapshots"
LOSSES = {
    "arrow": "",
    "hdf5": "priorities, times, sources, trajectory ids, infos of episodes, specs; which rows interleave; "
    "variable-length fields, which are rejected",
    "minari": "priorities, times, sources, trajectory ids, specs except spaces; which rows interleave; "
    "variable-length fields, which are rejected",
    "npz": "priorities, times, sources, trajectory ids, infos of episodes, specs; which rows interleave; "
    "variable-length fields, which are rejected",
    "parquet": "",
    "zarr": "sources, trajectory ids, statuses and infos of episodes, specs; variable-length fields, "
    "which are rejected",
}


def describe_losses(form: str) -> str:
    """Return a description of what a format cannot store."""
    return "; ".join(filter(None, [LOST_BY_ALL, LOSSES[form]]))
