"""Episodes of a made-up arm that reaches for points, some of them odd in one way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

#: Ways in which single episodes are odd, and ways in which all episodes of a source or a version are.
SINGLE = ("stuck", "jitter", "jump", "short", "copy", "camera", "gap")
GROUPS = ("scale", "sign", "early", "worse")

Episode = tuple[dict[str, Any], str, dict[str, Any]]


def make_episodes(kind: str, seed: int, count: int = 300) -> Iterator[tuple[Episode, bool]]:
    """Yield rows, source and facts of episodes, and whether each is odd: one in twelve, or a group.

    Args:
        kind: One of `SINGLE` or `GROUPS`; "" for no odd episodes.
        seed: Of all random numbers.
        count: Number of episodes.
    """
    rng = np.random.default_rng(seed)
    single = set()
    if kind in SINGLE:
        single = set(rng.choice(np.arange(30, count), count // 12, replace=False).tolist())
    before: list[dict[str, Any]] = []
    for number in range(count):
        source, version = f"arm-{number % 3}", number // 20
        grouped = version == 11 if kind == "worse" else source == "arm-1" and number > count * 2 // 3
        is_odd = number in single if kind in SINGLE else kind in GROUPS and grouped
        rows = _reach(rng, 0.03 if kind == "worse" and is_odd else 0.15 + 0.002 * version)
        if is_odd:
            rows = before[int(rng.integers(20))] if kind == "copy" else _spoil(rows, kind, rng)
        before.append(rows)
        yield (rows, source, {"policy_version": version}), is_odd


def _reach(rng: np.random.Generator, gain: float) -> dict[str, Any]:
    """Return the rows of one attempt: joints of 4 values, actions of 2, a camera and rewards."""
    length = int(rng.integers(30, 80))
    place, goal = rng.uniform(-1, 1, 4).tolist(), rng.uniform(-0.7, 0.7, 2)
    places, actions = [place], []
    for noise in rng.normal(0, [0.2] * 2 + [0.005] * 4, (length, 6)).tolist():
        ahead = [wanted - at for wanted, at in zip(goal.tolist(), place[:2], strict=True)]
        action = [min(max(gain * 5 * way + more, -1), 1) for way, more in zip(ahead, noise, strict=False)]
        reached = [at + 0.1 * force for at, force in zip(place[:2], action, strict=True)]
        reached += [0.9 * at + 0.05 * force for at, force in zip(place[2:], action, strict=True)]
        place = [at + more for at, more in zip(reached, noise[2:], strict=True)]
        places.append(place)
        actions.append(action)
    joints = np.array(places, np.float32)
    return {
        "joints": joints[:-1],
        "action": np.array(actions, np.float32),
        "camera": (joints[:-1, :1, None] * 40 + 100 + rng.integers(0, 9, (length, 40, 40))).astype(np.uint8),
        "next": {
            "joints": joints[1:],
            "reward": -np.linalg.norm(goal - joints[1:, :2], axis=1).astype(np.float32),
            "terminated": np.arange(length) == length - 1,
            "truncated": np.zeros(length, bool),
        },
    }


def _spoil(rows: dict[str, Any], kind: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return the rows of an odd episode."""
    length, after = len(rows["action"]), rows["next"]
    begin = int(rng.integers(length // 3))
    joints = np.concatenate([rows["joints"], after["joints"][-1:]])
    if kind == "stuck":
        rows["action"][begin:, 1] = rows["action"][begin, 1]
    elif kind == "jitter":
        noisy = rows["action"] + rng.normal(0, 0.9, rows["action"].shape)
        rows["action"] = np.clip(noisy, -1, 1).astype(np.float32)
    elif kind == "jump":
        joints[begin + 5 :] += 1.0
    elif kind == "gap":
        joints[begin + 5 : begin + 7] += 0.2
        return rows | {"joints": joints[:-1]}
    elif kind == "scale":
        joints = joints * 4
    elif kind == "camera":
        rows["camera"] = np.repeat(rows["camera"][:1], length, axis=0)
    elif kind == "sign":
        after["reward"] = -after["reward"]
    rows, after = rows | {"joints": joints[:-1]}, after | {"joints": joints[1:]}
    if kind in ("short", "early"):
        length = max(3, length // 6)
        rows = {name: values[:length] for name, values in rows.items() if name != "next"}
        after = {name: values[:length].copy() for name, values in after.items()}
        after["truncated" if kind == "short" else "terminated"][-1] = True
    return rows | {"next": after}
