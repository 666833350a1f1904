"""Read parts of an episode: some steps, some fields, or frames of an image field.

Used by the routes that read episodes. What is read is limited before values are read; nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from expstore.api.errors import Refusal
from expstore.buffers.read_limits import ReadLimit
from expstore.core.values import Array, IntArray, key_name
from expstore.data.batch import Builder
from expstore.data.images import ImageLayout, find_image, shrink_rows, to_pixels
from expstore.errors import SchemaError
from expstore.schema.schema import Schema
from expstore.storages.episode_lookup import steps_of_episode
from expstore.storages.read_view import ReadView, read_present, read_rows, read_stable

#: Bytes of frames that are read at a time, and most bytes of an answer with frames.
_PIECE_BYTES, _ANSWER_BYTES = 16 << 20, 32 << 20


@dataclass(frozen=True)
class Steps:
    """A choice of steps of an episode.

    Args:
        start: The first step.
        count: Most steps from there; None: all.
        listed: These steps instead, in this order; negative ones count from the newest row, which is -1.
    """

    start: int = 0
    count: int | None = None
    listed: Sequence[int] | None = None

    def choose(self, steps: IntArray) -> IntArray:
        """Return the positions of the chosen steps that have rows.

        Args:
            steps: Steps of the episode's readable rows, ascending. Shape `(n,)`.
        """
        if self.listed is None:
            first = np.searchsorted(steps, self.start)
            end = steps.size if self.count is None else np.searchsorted(steps, self.start + self.count)
            return np.arange(first, end)
        wanted = np.array(self.listed, np.int64)
        places = np.where(wanted < 0, steps.size + wanted, np.searchsorted(steps, wanted))
        held = (places >= 0) & (places < steps.size)
        held &= (wanted < 0) | (steps[np.clip(places, 0, steps.size - 1)] == wanted)
        return places[held]


def _places(schema: Schema, names: Sequence[str] | None) -> list[int]:
    """Return the positions of fields.

    Raises:
        SchemaError: There is no such field.
    """
    if names is None:
        return list(range(len(schema.fields)))
    known = {key_name(key): place for place, key in enumerate(schema.keys)}
    for name in names:
        if name not in known:
            raise SchemaError(f"no field {name[:100]!r}", hint=f"the fields are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def read_fields(
    storage: ReadView, episode: int, names: Sequence[str] | None, steps: Steps, limit: ReadLimit
) -> tuple[TensorDict, IntArray]:
    """Return rows of an episode, in the order of steps, and their steps.

    Args:
        storage: Storage of the rows.
        episode: Id of the episode.
        names: Names of the fields; None: all.
        steps: Which steps.
        limit: Limits what is read.

    Returns:
        The fields, `index` and `id`, batch size `[n]`; and the steps, shape `(n,)`.

    Raises:
        NotFoundError: There is no such episode, or none of its rows is left.
        SchemaError: There is no such field.
        QueryError: The rows take too many bytes.
    """

    def read() -> tuple[TensorDict, IntArray]:
        schema = storage.require_schema()
        places = _places(schema, names)
        part, chosen = Schema([schema.fields[place] for place in places]), np.zeros(0, np.int64)

        def locate() -> IntArray:
            nonlocal chosen
            ids, numbers = steps_of_episode(storage, episode)
            held = steps.choose(numbers)
            chosen = numbers[held]
            limit.check(storage, ids[held], part)
            return ids[held]

        ids, columns = read_rows(storage, locate, places)
        own = {"index": storage.geometry.index_of(ids), "id": ids}
        root = {name: torch.from_numpy(values) for name, values in own.items()}
        return Builder(part).build(columns, torch.Size([ids.size]), root), chosen

    steps_of_episode(storage, episode)  # so that an unknown episode is reported before unknown fields
    return read_stable(storage, read)


@dataclass(frozen=True)
class Frames:
    """Frames of an episode.

    Args:
        pixels: Shape `(n, height, width, channels)`, uint8.
        steps: The step of each. Shape `(n,)`.
        layout: How rows became pictures.
    """

    pixels: Array
    steps: IntArray
    layout: ImageLayout


def read_frames(
    storage: ReadView, episode: int, name: str, steps: Steps, max_side: int | None, most_bytes: int
) -> Frames:
    """Return frames of an image field; frames that are evicted meanwhile are left out.

    Args:
        storage: Storage of the rows.
        episode: Id of the episode.
        name: Name of the field.
        steps: Which steps.
        max_side: Most pixels of the longer side; None: as stored.
        most_bytes: Most bytes of rows that are read.

    Raises:
        NotFoundError: There is no such episode, or none of its rows is left.
        SchemaError: There is no such field, or it is not an image.
        Refusal: 413: the frames take too many bytes.
    """
    ids, numbers = steps_of_episode(storage, episode)
    chosen = steps.choose(numbers)

    def read() -> Frames:
        schema = storage.require_schema()
        (place,) = _places(schema, [name])
        layout = _require_image(schema, place)
        row_bytes = schema.fields[place].row_bytes
        height, width = layout.size(max_side)
        fitting = min(_ANSWER_BYTES // (height * width * layout.channels), most_bytes // row_bytes)
        if chosen.size > fitting:
            raise Refusal(
                413, f"{chosen.size} frames are too large: {fitting} fit into an answer",
                hint="ask for fewer frames, or for smaller ones with max_side",
            )  # fmt: skip
        each = max(1, _PIECE_BYTES // row_bytes)
        pictures, found = [], []
        for part in np.split(chosen, range(each, chosen.size, each)):
            held, (rows,) = read_present(storage, ids[part], [place])
            pictures.append(shrink_rows(rows, layout, max_side))
            whole = held.size == part.size
            found.append(numbers[part] if whole else numbers[part][np.isin(ids[part], held)])
        return Frames(to_pixels(np.concatenate(pictures)), np.concatenate(found), layout)

    return read_stable(storage, read)


def _require_image(schema: Schema, place: int) -> ImageLayout:
    layout = find_image(schema.fields[place])
    if layout is None:
        images = [key_name(entry.key) for entry in schema.fields if find_image(entry)]
        raise SchemaError(
            f"field {key_name(schema.keys[place])!r} is not an image, but {schema.fields[place]}",
            hint=f"the images are {', '.join(images)}" if images else "no field of this store is an image",
        )
    return layout
