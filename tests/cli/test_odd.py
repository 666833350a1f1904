"""`expstore odd`: the odd episodes of a store, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

import expstore
from tests.support.commands import Cli
from tests.support.odd_episodes import make_episodes

pytestmark = pytest.mark.index


def test_odd_episodes_are_listed_with_the_reason(cli: Cli, tmp_path: Path) -> None:
    path, odd = tmp_path / "run.exp", []
    with expstore.open(path) as rb:
        assert cli("odd", path).out == "0 of 0 episodes are odd\n"
        for number, ((rows, source, facts), is_odd) in enumerate(make_episodes("stuck", 0, 60)):
            rb.extend(rows, source=source, episode_info=facts)
            if is_odd:
                odd.append(number + 1)
        rb.episodes.measure()
        done = cli("odd", path, "--limit", "2")  # while another process may write
        assert (done.code, done.err) == (0, "")
        first, head, *rows = done.out.splitlines()
        assert first == f"{len(odd)} of 60 episodes are odd"
        assert head.split() == ["episode", "source", "score", "reason"]
        assert len(rows) == 2
        assert all("action[1] does not change in" in row for row in rows)
        assert all(int(row.split()[0]) in odd for row in rows)
    found = cli("odd", path, "--json").json
    assert (found["compared"], found["odd"]) == (60, len(odd))
    assert {one["episode_id"] for one in found["episodes"]} == set(odd)
    assert {(one["measure"], one["field"], one["component"]) for one in found["episodes"]} == {
        ("still", "action", 1)
    }
    assert cli("odd", tmp_path / "none.exp").code == 2
