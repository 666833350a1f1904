"""Checks of an open store against a ledger: rows, episodes, SQL, and the next batch.

Used by the children of the crash tests. Each check raises Wrong with a description; none changes the store
except by sampling.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.core.idempotency import WriteKey
from expstore.disk.files import Disk
from expstore.errors import NotReadyError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.batch import now_us
from expstore.storages.columns.checksums import BLOCK_ROWS, GIVEN_UP, NOTHING, SUMMED, blocks_of, state_of
from expstore.storages.columns.sample_counts_column import find_sampled
from expstore.storages.snapshots.catalog import list_versions
from expstore.testing.model import STATUS_NAMES
from tests.crash import ledger as facts
from tests.crash.ledger import Ledger, Op


class Wrong(AssertionError):
    """A promise is broken."""


def expect(holds: bool, text: str) -> None:
    """Raise Wrong with a text unless a condition holds."""
    if not holds:
        raise Wrong(text)


def key_of(key: str) -> dict[str, Any]:
    """Return the keywords of an extend under a key, in addition to its rows."""
    return {"idempotency_key": key, "digest": hashlib.blake2b(key.encode(), digest_size=16).digest()}


def check_keys(rb: Any, state: Ledger) -> None:
    """Compare the known idempotency keys with those of the newest writes; repeat these writes."""
    row = facts.batch(state.spec, Op("extend"), np.ones(1, np.int64))
    kept, newest = rb.storage, list(state.keys.items())[-tuning.IDEMPOTENCY_KEYS :]
    for key, (first, count) in newest:
        given = rb.extend(row, return_ids=True, **key_of(key)).tolist()
        wanted = list(range(first, first + count))
        expect(given == wanted, f"a write that is made again gave ids {given}, expected {wanted}")
    known = {key for key, _ in newest}
    for key in [*state.keys, *state.lost]:
        found = kept.state.write_keys.find(WriteKey.of(*key_of(key).values()), now_us())
        expect((found is not None) == (key in known), f"a key that must not be known has {found}")
    expect(
        len(kept.state.write_keys) == len(known), f"{len(kept.state.write_keys)} keys, expected {len(known)}"
    )


def check_rows(rb: TensorDictReplayBuffer, state: Ledger) -> None:
    """Compare every readable row, in every column, with the ledger."""
    kept = rb.storage
    window = kept.window
    expect(
        (window.low, window.last) == (state.low, state.last),
        f"window ({window.low}, {window.last}], expected ({state.low}, {state.last}]",
    )
    expect(len(kept) == state.ids.size, f"len {len(kept)}, expected {state.ids.size}")
    expect(rb.write_count == state.write_count, f"write_count {rb.write_count}, expected {state.write_count}")
    ids = state.ids
    if not ids.size:
        return
    schema = kept.require_schema()
    wanted, ragged = state.fields(ids), state.ragged_fields(ids)
    own_keys, known = {f.key for f in schema.fields}, {*wanted, *((name,) for name in ragged)}
    expect(own_keys == known, f"there are other fields: {sorted(own_keys ^ known)}")
    places = range(len(schema.fields) + 5)
    views = kept.views(places, window.low + 1, window.size)
    found = [
        part if f.variable else np.concatenate(part)
        for f, part in zip((*schema.fields, *ROW_FIELDS), views, strict=True)
    ]
    flat = [(n, f) for n, f in enumerate(schema.fields) if not f.variable]
    pairs = [(".".join(f.key), found[n], wanted[f.key]) for n, f in flat]
    for name, values in ragged.items():
        have = [row for part in found[schema.place((name,))] for row in part.to_pylist()]
        wrong = [i for i, a, b in zip(ids.tolist(), have, values, strict=True) if a != b]
        expect(not wrong, f"{name} differs in {len(wrong)} rows: ids {wrong[:4]} of {ids[0]}..{ids[-1]}")
    own = len(schema.fields)
    pairs += [
        ("_row.id", found[own], ids),
        ("_row.episode", found[own + 1], state.column("episode", ids)),
        ("_row.step", found[own + 2], state.column("step", ids)),
    ]
    for name, have, want in pairs:
        if not np.array_equal(have, want):
            bad = ids[(have != want).reshape(ids.size, -1).any(axis=1)]
            raise Wrong(
                f"{name} differs in {bad.size} rows: ids {bad[:4]} to {bad[-1]} of {ids[0]}..{ids[-1]}"
            )
    times = found[own + 3]
    expect(bool((times > 1_600_000_000_000_000).all()), "a row has no time")
    for i, value in zip(ids.tolist(), found[own + 4].tolist(), strict=True):
        held = [float(np.float32(v)) for v in state.priorities[i]]
        expect(value in held, f"priority of {i} is {value}, expected one of {held}")
        state.priorities[i] = (value,)


def check_sampled(rb: TensorDictReplayBuffer, state: Ledger, *, cut: bool = False) -> None:
    """Compare how often each row was returned, in RAM and in the column, with the ledger; update it.

    After a kill the count includes every returned batch, and perhaps one under way. After a power cut (`cut`)
    it is any count since the last sync.
    """
    kept, ids = rb.storage, state.ids
    if state.spec.consume is None or not ids.size:
        return
    pieces = kept.geometry.runs(int(ids[0]), ids.size)
    found = np.concatenate(kept.state.sampled.views(pieces))
    column = np.concatenate([kept.state.sampled.column.read(slot, n) for slot, _, n in pieces])
    expect(np.array_equal(found, column), "the column has other counts than the handle")
    for i, count in zip(ids.tolist(), found.tolist(), strict=True):
        held = state.sampled[i]
        may_be = held if cut else held[-2:] if i in state.taking else held[-1:]
        expect(count in may_be, f"row {i} counts {count}, expected one of {may_be}")
        state.sampled[i] = (count,)
    state.taking = ()
    expect(len(rb) == state.left.size, f"{len(rb)} rows are left, expected {state.left.size}")


def check_sums(rb: TensorDictReplayBuffer) -> None:
    """Compare the checksums of a store that was just opened with its columns; every readable row has them."""
    group, sums, window = rb.storage.state.columns, rb.storage.state.checksums, rb.storage.window
    if group is None:
        return
    pieces = rb.storage.geometry.runs(window.low + 1, window.size) if window.size else []
    lacking = sums.find_missing(blocks_of(pieces))
    expect(not lacking, f"blocks {sorted(lacking)} hold readable rows and have no checksums")
    for block in range(sums.blocks):
        entry = sums.entry(block)
        if state_of(entry) != SUMMED:
            expect(state_of(entry) in (NOTHING, GIVEN_UP), f"the checksums of block {block} are damaged")
            continue
        for place, column in [*group.flat.items()][:-1]:  # not the priorities; others have own checksums
            expect(column.ready > block * BLOCK_ROWS, f"block {block} has checksums and no place")
            rows = column.view[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
            rows = rows.reshape(-1).view(np.uint8)
            name = ".".join(column.entry.key)
            expect(
                google_crc32c.value(rows) == entry["sums"][place], f"block {block} of {name} has another sum"
            )


def check_episodes(rb: TensorDictReplayBuffer, state: Ledger) -> None:
    """Compare the episodes in log and memory with the ledger."""
    latest = {e.episode: e for e in rb.storage.state.log.read() if e.episode}
    latest |= {e.episode: e for e in rb.storage.episodes.open_entries()}
    found = {n: (e.length, e.ret, e.status, e.last_id) for n, e in latest.items()}
    wanted = {n: (e.length, e.ret, e.status, e.last_id) for n, e in state.episodes.items()}
    if found != wanted:
        differ = [n for n in sorted(found.keys() | wanted.keys()) if found.get(n) != wanted.get(n)]
        n = differ[0]
        raise Wrong(f"{len(differ)} episodes differ; {n} is {found.get(n)}, expected {wanted.get(n)}")
    expect(
        rb.storage.episodes.next_episode == state.next_episode,
        f"next episode {rb.storage.episodes.next_episode}, expected {state.next_episode}",
    )


def check_info(rb: TensorDictReplayBuffer, state: Ledger) -> None:
    """Compare annotations of episodes with the ledger."""
    latest = {e.episode: e for e in rb.storage.state.log.read() if e.episode}
    latest |= {e.episode: e for e in rb.storage.episodes.open_entries()}
    found = {n: json.loads(e.text) for n, e in latest.items() if e.text}
    wanted = {n: dict(e.info) for n, e in state.episodes.items() if e.info}
    if found != wanted:
        n = min(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
        raise Wrong(f"the annotations of episode {n} are {found.get(n)}, expected {wanted.get(n)}")


def check_sql(rb: TensorDictReplayBuffer, state: Ledger) -> None:
    """Compare the relation `episodes` and the number of rows with the ledger."""
    live = state.live_rows()
    wanted: list[tuple[Any, ...]] = [
        (
            n,
            e.source,
            e.length,
            e.ret,
            STATUS_NAMES[e.status],
            live.get(n, 0),
            json.dumps(dict(e.info)) if e.info else None,
        )
        for n, e in sorted(state.episodes.items())
    ]
    query = 'SELECT episode_id, source, length, "return", status, live_rows, info FROM episodes ORDER BY 1'
    for have, want in itertools.zip_longest(rb.sql(query).fetchall(), wanted):
        # The name of an unnamed source contains the number of the opening, which includes killed openings.
        same = have and want and (have[1] == want[1] or (want[1] is None and have[1][0] == "@"))
        same = same and (have[0], *have[2:]) == (want[0], *want[2:])
        expect(same, f"SQL says of an episode {have}, expected {want}")
    query = "SELECT episode_id, sum(length) FROM fragments GROUP BY ALL"
    found = {n: int(count) for n, count in rb.sql(query).fetchall()}
    wrong = [
        (n, found.get(n), live.get(n)) for n in found.keys() | live.keys() if found.get(n) != live.get(n)
    ]
    expect(not wrong, f"SQL counts other fragments (episode, rows, expected rows): {wrong[:4]}")
    if not state.write_count:
        return
    ids = state.ids
    total = (ids.size, int(ids[0]), int(ids[-1]), int(ids.sum())) if ids.size else (0, None, None, None)
    rows = rb.sql("SELECT count(*), min(_id), max(_id), sum(_id) FROM transitions").fetchall()[0]
    expect(rows == total, f"SQL counts {rows}, expected {total}")


def check_versions(
    place: Path, need: Collection[int], known: Mapping[int, Ledger], *, current: int
) -> dict[int, Ledger]:
    """Compare the snapshots in a folder with the ledger; return the existing ones.

    Args:
        place: The folder.
        need: Numbers of the snapshots that must exist.
        known: Contents of all snapshots that may exist.
        current: The oldest snapshot that may be the newest.
    """
    versions = list_versions(Disk(), place)
    numbers = [version.number for version in versions]
    expect(set(need) <= set(numbers) <= known.keys(), f"versions {numbers}, expected {need} of {[*known]}")
    for number in numbers:
        state = known[number].copy()
        rb = expstore.open(place, version=number, batch_size=32, seed=facts.SEED)
        try:
            check_rows(rb, state)
            check_episodes(rb, state)
            check_info(rb, state)
            _check_version_sampled(rb, state)
        except Wrong as exc:
            raise Wrong(f"version {number}: {exc}") from exc
        finally:
            rb.close()
    if numbers:
        rb = expstore.open(place, mode="r")
        found = int(rb.storage.path.name[1:])
        rb.close()
        expect(found >= current, f"the newest is {found}, expected at least {current} of {numbers}")
    return {number: known[number] for number in numbers}


def _check_version_sampled(rb: TensorDictReplayBuffer, state: Ledger) -> None:
    """Compare how often rows had been returned when a snapshot was made with the ledger."""
    if state.spec.consume is None or not state.ids.size:
        return
    kept = rb.storage
    column = find_sampled(Disk(), kept.path / "columns", kept.geometry.slots)
    expect(column is not None, "there are no counts in it")
    parts = [column.read(slot, n) for slot, _, n in kept.geometry.runs(kept.window.low + 1, kept.window.size)]
    wanted = [state.sampled[i][-1] for i in state.ids.tolist()]
    expect(np.concatenate(parts).tolist() == wanted, "it has other counts")


def check_sample(rb: TensorDictReplayBuffer, state: Ledger) -> None:
    """Sample a batch and compare it with the documented algorithm."""
    expect(rb.storage.draws.number == state.draw, f"draw {rb.storage.draws.number}, expected {state.draw}")
    if not state.left.size:
        try:
            rb.sample()
        except NotReadyError:
            return
        raise Wrong("a batch was sampled although no row is left")
    wanted = state.next_sample(facts.SAMPLE)
    found = rb.sample()
    expect(np.array_equal(found["id"].numpy(), wanted), f"draw {state.draw} chose other rows")
    for key, column in state.fields(wanted).items():
        same = (found[key].numpy() == column).reshape(wanted.size, -1).all(axis=1)
        expect(bool(same.all()), f"draw {state.draw}: sampled {key} differs for ids {wanted[~same]}")
    if state.spec.ragged:
        ragged = state.ragged_fields(wanted)
        tokens = [row.tolist() for row in found["tokens"].unbind()]
        expect(tokens == ragged["tokens"], f"draw {state.draw}: sampled tokens differ")
        expect(list(found["text"]) == ragged["text"], f"draw {state.draw}: sampled texts differ")
