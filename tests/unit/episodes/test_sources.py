"""Names of sources and lanes: a user's name is never a lane's name."""

from __future__ import annotations

import numpy as np
import pytest

from expstore.episodes.segmentation import TRUNCATED, Steps
from expstore.episodes.sources import lane_names, stream_of
from expstore.episodes.table import EpisodeTable
from expstore.errors import SchemaError


def test_lanes_are_called_after_their_stream() -> None:
    assert lane_names("arm", "@1", 3) == ["arm", "arm//1", "arm//2"]
    assert lane_names(None, "@1", 2) == ["@1", "@1//1"]
    assert lane_names("arm/1", "@1", 2) == ["arm/1", "arm/1//1"]


def test_a_name_that_is_a_lanes_or_none_is_refused() -> None:
    for name in ("arm//1", "a//b//22", "", " a", "a ", "a\n", "a\t b", "a\0b", "\ud800", 5, b"a", ("a",)):
        with pytest.raises(SchemaError, match=r"source .* (is the name of a lane|is not a valid name)"):
            lane_names(name, "@1", 1)  # type: ignore[arg-type]
    assert lane_names("Größe 1/x", "@1", 1) == ["Größe 1/x"]


def test_no_two_streams_share_a_name() -> None:
    seen: dict[str, tuple[str, int]] = {}
    for source in ("a", "a/1", "a/1/1", "a/", "a//b", "1", "/1"):
        for lane, name in enumerate(lane_names(source, "@1", 12)):
            assert seen.setdefault(name, (source, lane)) == (source, lane)


def test_the_stream_of_a_lane() -> None:
    assert [stream_of(name) for name in ("arm", "arm//2", "arm/1", "a//b")] == ["arm", "arm", "arm/1", "a//b"]


def test_a_truncated_episode_that_continues_is_kept() -> None:
    """A long extend gives up rows after it was numbered; the index may be committed before it is there."""
    table = EpisodeTable(generation=1)
    steps = Steps(3, trajectories=np.full(3, 7), truncated=np.array([False, False, True]))
    first = table.assign(steps, source="a", first_id=1)
    table.commit(first.segments, first.sources, first_id=1, time=1, sequence=1)
    again = table.assign(steps, source="a", low=2, first_id=4)
    table.evict(3)  # the retired rows are gone, and with them all of the episode's
    table.commit(again.segments, again.sources, first_id=4, time=2, sequence=2)
    held = table.find(1)
    assert held is not None
    assert (held.length, held.status, held.start) == (6, TRUNCATED, 1)
    table.assign(steps, source="a", low=6, first_id=7)
    table.evict(6)
    assert not table.has_open(None)  # no row can continue it any more
