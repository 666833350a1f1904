"""What each format does not carry, in words.

Used by the formats, which tell it with every export, and by the command's help. It loads nothing.
"""

__all__ = ["LOSSES", "LOST_BY_ALL", "describe_losses"]

#: What no format stores, and what each format does not store besides.
LOST_BY_ALL = "ids, how often rows were sampled, the number of the next draw, layouts, versions"
LOSSES = {
    "arrow": "",
    "hdf5": "priorities, times, sources, trajectory ids, infos of episodes, specs; which rows interleave; "
    "fields without a fixed size, which are refused",
    "minari": "priorities, times, sources, trajectory ids, specs but for spaces; which rows interleave; "
    "fields without a fixed size, which are refused",
    "npz": "priorities, times, sources, trajectory ids, infos of episodes, specs; which rows interleave; "
    "fields without a fixed size, which are refused",
    "parquet": "",
    "zarr": "sources, trajectory ids, statuses and infos of episodes, specs; fields without a fixed size, "
    "which are refused",
}


def describe_losses(form: str) -> str:
    """Return what a format does not carry, in words."""
    return "; ".join(filter(None, [LOST_BY_ALL, LOSSES[form]]))
