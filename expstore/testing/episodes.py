"""Rows keep their episodes and steps whichever sources write in between; slices stay within an episode.

Part of the suite.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from expstore.errors import NotFoundError, QueryError, SchemaError
from expstore.samplers.slices import SliceSampler
from expstore.testing.assertions import expect, raises, same
from expstore.testing.buffer_and_model import Life
from expstore.testing.declaration import Declared
from expstore.testing.model import Cell
from expstore.testing.model_rows import check_rows

#: Two interleaved trajectories, then a third one.
_CELLS = [Cell(1), Cell(2), Cell(1), Cell(2, "t"), Cell(1), Cell(1, "T"), Cell(3), Cell(3)]


class EpisodeSuite(Declared):
    """Test the episodes of rows."""

    def test_streams_and_trajectories(self, tmp_path: Path) -> None:
        """Sources continue across batches, and trajectories within sources; each ends independently."""
        with self.life(tmp_path) as life:
            for _ in range(2):
                _busy(life)
                life.look(episodes=True)
            for run in life.model.runs():
                found = life.rb.trajectory(run[0].episode)
                rows = [row for part in life.model.runs() for row in part if row.episode == run[0].episode]
                check_rows(found, rows, f"trajectory {run[0].episode}")
            with raises(NotFoundError, what="a trajectory that does not exist"):
                life.rb.trajectory(1000)
            with raises(NotFoundError, what="a trajectory whose rows were overwritten"):
                life.rb.trajectory(1)

    def test_episodes_without_trajectory_ids(self, tmp_path: Path) -> None:
        """Flags end a source's episode."""
        with self.life(tmp_path, trajectories=False) as life:
            for source in ("a", "b", None, "a"):
                life.extend([Cell(), Cell(), Cell(0, "t"), Cell(), Cell(0, "T"), Cell()], source)
                life.add(Cell(0, "T"), source)
                life.look(episodes=True)

    def test_lanes_are_streams(self, tmp_path: Path) -> None:
        """Each position along the lane dim has its own episodes."""
        with self.life(tmp_path, 24, lanes=2, trajectories=False) as life:
            for marks in ("..t.", "..", "T..t..", "." * 20):
                cells = [Cell(0, mark.strip(".")) for mark in marks]
                life.extend(cells, "w" if len(marks) == 6 else None)
                life.look(episodes=True)

    def test_slices_never_cross(self, tmp_path: Path) -> None:
        """Slices are consecutive steps of one episode, and every possible slice is drawn."""
        length = 3
        with self.life(tmp_path, sampler=lambda: SliceSampler(slice_len=length), batch_size=30) as life:
            for cycle in range(3):
                _busy(life)
                if cycle == 1:
                    life.lap(4)
                    _busy(life)
                there = {
                    tuple(row.id for row in run[start : start + length])
                    for run in life.model.runs()
                    for start in range(len(run) - length + 1)
                }
                found: set[tuple[int, ...]] = set()
                for _ in range(25):
                    _, info = life.rb.sample(return_info=True)
                    found |= {tuple(ids) for ids in info["id"].view(-1, length).tolist()}
                same(sorted(found), sorted(there), "the slices that are drawn")

    def test_facts_about_episodes(self, tmp_path: Path) -> None:
        """Annotations are written with rows or later, and remain when the rows are overwritten."""
        with self.life(tmp_path) as life:
            life.rb.extend(life.batch(life.model.extend(_CELLS[:4], "a")), source="a", episode_info={"n": 1})
            same(
                life.rb.episodes.annotate(1, n=2, who="x"),
                {"n": 2, "who": "x"},
                "the annotations of an episode",
            )
            life.extend(30)
            life.rb.episodes.annotate(1, who=None, late=True)
            asked = "SELECT episode_id, info->>'n', info->>'late' FROM episodes ORDER BY 1"
            found = life.rb.sql(asked).fetchall()
            same(found, [(1, "2", "true"), (2, "1", None), (3, None, None)], "facts about episodes")
            with raises(NotFoundError, what="an annotation of an unknown episode"):
                life.rb.episodes.annotate(99, n=1)
            with raises(SchemaError, what="an annotation that is not JSON"):
                life.rb.episodes.annotate(1, n=object())
            life.look()

    def test_sql(self, tmp_path: Path) -> None:
        """SQL reads fields, episodes and priorities; statements other than queries are refused."""
        with self.life(tmp_path) as life:
            _busy(life)
            rows = life.model.live
            life.set_priorities({rows[3].id: 0.5})
            asked = "SELECT _id, next.reward, value, next.terminated FROM transitions WHERE number >= $low"
            low = rows[5].serial
            found = life.rb.sql(f"{asked} ORDER BY _id", {"low": low}).fetchall()
            expected = [
                (row.id, row.serial % 17 / 4, row.serial * 125.0, row.cell.mark == "t") for row in rows[5:]
            ]
            same(found, expected, "rows in SQL")
            found = life.rb.sql("SELECT * FROM priorities ORDER BY 1").fetchall()
            expected_priorities = [(id, value) for id, value in life.model.priorities.items()]
            same([tuple(row[:2]) for row in found], expected_priorities, "the relation priorities")
            lengths = Counter(row.episode for row in rows)
            found = life.rb.sql("SELECT _episode, count(*) FROM transitions GROUP BY 1 ORDER BY 1").fetchall()
            same(found, sorted(lengths.items()), "rows of each episode")
            for wrong in ("DELETE FROM transitions", "SELECT nothing FROM transitions", "SELEC 1"):
                with raises(QueryError, what=f"the query {wrong!r}"):
                    life.rb.sql(wrong)
            life.look(episodes=True)

    def test_trajectories_by_condition(self, tmp_path: Path) -> None:
        """`query` returns the trajectories that meet a condition, with their rows in order."""
        with self.life(tmp_path) as life:
            _busy(life)
            found = life.rb.query(lambda trajectory: len(trajectory) >= 3)
            runs: dict[int, list[int]] = {}
            for run in life.model.runs():
                runs.setdefault(run[0].episode, []).extend(row.serial for row in run)
            expected = [serials for serials in runs.values() if len(serials) >= 3]
            same([one["number"].tolist() for one in found], expected, "trajectories of three steps or more")
            expect(np.concatenate(expected).size > 3, "no trajectory of the model meets the condition")


def _busy(life: Life) -> None:
    """Let three sources write interleaved trajectories, some of which end."""
    first = life.model.serial * 4 + 1  # trajectory ids that were not used before

    def name_cells(cells: list[Cell]) -> list[Cell]:
        return [Cell(first + cell.trajectory, cell.mark) for cell in cells]

    life.extend(name_cells(_CELLS), "a")
    life.extend(name_cells([Cell(7), Cell(7), Cell(8, "t")]), "b")
    life.add(Cell(first + 9))
    life.extend(name_cells([Cell(3), Cell(4), Cell(3, "t")]), "a")
    life.extend(name_cells([Cell(7), Cell(9), Cell(7)]), "b")
    life.extend(name_cells([Cell(9)] * 4 + [Cell(9, "T")]))
