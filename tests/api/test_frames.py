"""Parts of episodes: some fields of some steps, and frames of image fields."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from tests.support.arrow_bodies import ACCEPT_ARROW, rows_of
from tests.support.asgi import api_client, refusal_of

RUN = "/v1/stores/run/episodes"
LENGTH = 40


def make_rows(first: int = 0) -> TensorDict:
    """Return an episode with image fields of all layouts."""
    numbers = np.random.default_rng(first)
    done = torch.zeros(LENGTH, 1, dtype=torch.bool)
    done[-1] = True

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(numbers.integers(0, 256, (LENGTH, *shape), np.uint8))

    return TensorDict(
        {
            "pixels": draw(20, 24, 3),
            "chw": draw(3, 20, 24),
            "grey": draw(20, 24),
            "stack": draw(4, 20, 24),
            "rgb_stack": draw(9, 20, 24),
            "unit": draw(20, 24, 3).float() / 255,
            "half": (draw(20, 24, 1).float() / 127.5 - 1).bfloat16(),
            "wide": draw(20, 24, 3).float() * 100 - 5000,
            "action": torch.arange(LENGTH) + first,
            "text": [f"<b>{n}\u202e" for n in range(LENGTH)],
            "next": {"reward": torch.arange(LENGTH)[:, None].float(), "done": done, "terminated": done},
        },
        [LENGTH],
    )


DATA = make_rows()


@pytest.fixture(scope="module", params=["zarr", "arrow"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    with expstore.open(found / "run.exp", layout=request.param) as rb:
        for rows in (DATA, make_rows(100)):
            rb.extend(rows if request.param == "arrow" else rows.exclude("text"))
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["writer", "reader"])
def client(request: pytest.FixtureRequest, folder: Path) -> Iterator[httpx.Client]:
    with api_client(folder, read_only=request.param) as client:
        yield client


def read(client: httpx.Client, episode: int = 1, **params: Any) -> tuple[np.ndarray, httpx.Headers]:
    answer = client.get(f"{RUN}/{episode}/frames", params=params)
    assert answer.status_code == 200, answer.text
    shape = [int(size) for size in answer.headers["X-Shape"].split(",")]
    return np.frombuffer(answer.content, np.uint8).reshape(shape), answer.headers


# -- fields and steps ----------------------------------------------------------------------------------


def test_some_fields_of_some_steps(client: httpx.Client) -> None:
    answer = client.get(f"{RUN}/1", params={"fields": "next.reward,action", "start": 5, "count": 3})
    assert answer.json()["rows"] == {
        "next.reward": [5.0, 6.0, 7.0], "action": [5, 6, 7], "index": [5, 6, 7], "id": [6, 7, 8]
    }  # fmt: skip
    assert (answer.headers["X-First-Step"], answer.headers["X-Rows"]) == ("5", "3")
    whole = client.get(f"{RUN}/2", params={"fields": "half,action", "start": 38}, headers=ACCEPT_ARROW)
    rows = rows_of(whole.content)
    assert torch.equal(rows["half"].float(), make_rows(100)["half"][38:].float())
    assert rows["action"].tolist() == [138, 139]
    assert sorted(rows.keys()) == ["action", "half", "id", "index"]
    none = client.get(f"{RUN}/1", params={"fields": "action", "start": 100})
    assert none.json()["rows"]["action"] == []


def test_parts_that_are_refused(client: httpx.Client) -> None:
    odd = client.get(f"{RUN}/1", params={"fields": "action,<script>"})
    assert refusal_of(odd) == (422, "schema")
    assert "no field '<script>'" in odd.json()["error"]["message"]
    for params in ({"start": -1}, {"count": 0}, {"fields": ""}, {"fields": "x" * 5000}):
        assert client.get(f"{RUN}/1", params=params).status_code == 422
    for episode in (0, 3, 1 << 62):
        assert client.get(f"{RUN}/{episode}", params={"fields": "action"}).status_code == 404


def test_parts_are_limited_in_bytes(folder: Path) -> None:
    """Only the fields that are read count."""
    with api_client(folder, read_only=True, max_answer=20_000) as client:
        assert client.get(f"{RUN}/1").status_code == 413
        assert client.get(f"{RUN}/1", params={"fields": "action"}).status_code == 200
        refused = client.get(f"{RUN}/1", params={"fields": "pixels"}, headers=ACCEPT_ARROW)
        assert refused.status_code == 413
        assert "fits is 13" in refused.json()["error"]["message"]
        parts = {"fields": "pixels", "count": 13}
        assert client.get(f"{RUN}/1", params=parts, headers=ACCEPT_ARROW).status_code == 200


# -- frames --------------------------------------------------------------------------------------------


def test_frames_of_every_layout(client: httpx.Client) -> None:
    steps = {"steps": "3,0,-1"}
    rows = [3, 0, 39]
    for field, layout, pixels in (
        ("pixels", "HWC", DATA["pixels"]),
        ("chw", "CHW", DATA["chw"].permute(0, 2, 3, 1)),
        ("grey", "HW", DATA["grey"][..., None]),
        ("stack", "stacked", DATA["stack"][:, -1, :, :, None]),
        ("rgb_stack", "stacked", DATA["rgb_stack"][:, -3:].permute(0, 2, 3, 1)),
        ("unit", "HWC", DATA["unit"] * 255),
    ):
        found, headers = read(client, field=field, **steps)
        np.testing.assert_array_equal(found, pixels.round().numpy()[rows], err_msg=field)
        assert (headers["X-Layout"], headers["X-Steps"]) == (layout, "3,0,39")
    half, _ = read(client, field="half", start=1, count=2)
    expected = (DATA["half"][1:3].float() + 1) * 127.5
    assert np.abs(half - expected.numpy()).max() < 1.01
    wide, _ = read(client, field="wide", count=LENGTH)
    assert (wide.min(), wide.max()) == (0, 255)


def test_windows_of_frames(client: httpx.Client) -> None:
    found, headers = read(client, 2, field="grey", start=30, count=32)
    assert headers["X-Steps"] == ",".join(map(str, range(30, 40)))
    np.testing.assert_array_equal(found, make_rows(100)["grey"][30:, ..., None])
    found, headers = read(client, field="grey")
    assert found.shape == (32, 20, 24, 1)
    found, headers = read(client, field="grey", start=40)
    assert (found.shape, headers["X-Steps"]) == ((0, 20, 24, 1), "")
    found, headers = read(client, field="grey", steps="7,99,-41,7")
    assert (found.shape[0], headers["X-Steps"]) == (2, "7,7")


def test_frames_are_reduced_to_means(client: httpx.Client) -> None:
    found, _ = read(client, field="pixels", max_side=12)
    cells = DATA["pixels"][:32].float().reshape(32, 10, 2, 12, 2, 3).mean((2, 4))
    assert found.shape == (32, 10, 12, 3)
    assert np.abs(found - cells.numpy()).max() <= 0.5
    assert read(client, field="pixels", max_side=24)[0].shape == (32, 20, 24, 3)
    assert read(client, field="unit", max_side=1)[0].shape == (32, 1, 1, 3)


def test_a_frame_as_png(client: httpx.Client) -> None:
    for field, mode in (("pixels", "RGB"), ("grey", "L")):
        answer = client.get(f"{RUN}/1/frames", params={"field": field, "format": "png", "start": 4})
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "image/png")
        image = Image.open(io.BytesIO(answer.content))
        assert image.mode == mode
        np.testing.assert_array_equal(np.asarray(image), DATA[field][4])
    two = client.get(f"{RUN}/1/frames", params={"field": "grey", "format": "png", "count": 2})
    assert two.status_code == 422
    late = client.get(f"{RUN}/1/frames", params={"field": "grey", "format": "png", "start": 99})
    assert late.status_code == 404


def test_frames_that_are_refused(client: httpx.Client) -> None:
    for field in ("action", "nothing", "<img>", "next.reward"):
        refused = client.get(f"{RUN}/1/frames", params={"field": field})
        assert refusal_of(refused) == (422, "schema")
        if field == "action":
            assert "the images are pixels" in refused.json()["error"]["hint"]
    for params in ({}, {"field": "grey", "steps": "1,x"}, {"field": "grey", "max_side": 0},
                   {"field": "grey", "count": 5000}, {"field": "grey", "format": "gif"}):  # fmt: skip
        assert client.get(f"{RUN}/1/frames", params=params).status_code == 422
    assert client.get(f"{RUN}/9/frames", params={"field": "grey"}).status_code == 404


def fill(rb: TensorDictReplayBuffer, first: int, count: int, side: int) -> None:
    rb.extend(TensorDict({"pixels": torch.zeros(count, side, side, 3, dtype=torch.uint8),
                          "number": torch.arange(first, first + count)}, [count]))  # fmt: skip


@pytest.mark.slow
def test_large_frames_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        fill(rb, 0, 8, 2000)
    with api_client(tmp_path) as client:
        refused = client.get(f"{RUN}/1/frames", params={"field": "pixels"})
        assert refusal_of(refused) == (413, "too_large")
        assert "8 frames are too large: 2 fit" in refused.json()["error"]["message"]
        assert read(client, field="pixels", count=2)[0].shape == (2, 2000, 2000, 3)
        assert read(client, field="pixels", max_side=200)[0].shape == (8, 200, 200, 3)
    with api_client(tmp_path, max_answer=3 * 12_000_000) as client:
        refused = client.get(f"{RUN}/1/frames", params={"field": "pixels", "max_side": 200})
        assert "3 fit" in refused.json()["error"]["message"]


def test_steps_of_a_ring_that_has_lost_the_first_rows(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=50) as rb:
        for first in range(0, 120, 30):
            fill(rb, first, 30, 8)
    with api_client(tmp_path) as client:
        found, headers = read(client, field="pixels", steps="0,69,70,-1,-50,-51")
        assert (found.shape[0], headers["X-Steps"]) == (3, "70,119,70")
        part = client.get(f"{RUN}/1", params={"fields": "number", "start": 10, "count": 62})
        assert part.json()["rows"]["number"] == [70, 71]
        assert part.headers["X-First-Step"] == "70"


def test_an_empty_store_has_no_frames(tmp_path: Path) -> None:
    with api_client(tmp_path) as client:
        client.put("/v1/stores/run", json={}).raise_for_status()
        assert client.get(f"{RUN}/1/frames", params={"field": "pixels"}).status_code == 404
        assert client.get(f"{RUN}/1", params={"fields": "x"}).status_code == 404
