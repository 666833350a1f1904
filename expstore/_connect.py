"""`expstore.connect`: use one served store, or several as shards, as a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, overload

import torch

from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.cluster.buffer import ShardedReplayBuffer
from expstore.cluster.members import FileMembers, FixedMembers, Members
from expstore.core.arguments import refuse_unknown
from expstore.disk.local_path import local_path
from expstore.errors import ArgumentError
from expstore.rate_limiters import RateLimiter
from expstore.remote.client import RemoteReplayBuffer
from expstore.remote.connect_options import By, ConnectOptions, Down
from expstore.remote.tokens import Token, Tokens
from expstore.remote.transport import Address, Connection, Retries

#: The end of text that is the path of a cluster file, and not an address.
_CLUSTER_FILE = ".json"


@overload
def connect(  # type: ignore[overload-overlap]  # text is also a sequence of texts
    url: str,
    *,
    token: Token = None,
    timeout: float = 30.0,
    retries: Retries | None = None,
    batch_size: int | None = None,
    sampler: str | Mapping[str, Any] | None = None,
    where: str | None = None,
    seed: int | None = None,
    draw: int = 0,
    wait: float | None = None,
    device: torch.device | str | None = None,
    prefetch: int | None = None,
    priority_key: str = "td_error",
    as_numpy: bool = False,
) -> RemoteReplayBuffer: ...


@overload
def connect(
    url: Sequence[str | ReplayBuffer] | PathLike[str],
    *,
    token: Token = None,
    timeout: float = 30.0,
    retries: Retries | None = None,
    batch_size: int | None = None,
    sampler: str | Mapping[str, Any] | None = None,
    where: str | None = None,
    seed: int | None = None,
    draw: int = 0,
    wait: float | None = None,
    device: torch.device | str | None = None,
    priority_key: str = "td_error",
    as_numpy: bool = False,
    ahead: int | None = None,
    down: Down | None = None,
    by: By | None = None,
    p: Sequence[float] | None = None,
    rate_limiter: RateLimiter | None = None,
) -> ShardedReplayBuffer: ...


@refuse_unknown({})
def connect(
    url: str | Sequence[str | ReplayBuffer] | PathLike[str],
    *,
    token: Token = None,
    timeout: float = 30.0,
    retries: Retries | None = None,
    batch_size: int | None = None,
    sampler: str | Mapping[str, Any] | None = None,
    where: str | None = None,
    seed: int | None = None,
    draw: int = 0,
    wait: float | None = None,
    device: torch.device | str | None = None,
    prefetch: int | None = None,
    priority_key: str = "td_error",
    as_numpy: bool = False,
    ahead: int | None = None,
    down: Down | None = None,
    by: By | None = None,
    p: Sequence[float] | None = None,
    rate_limiter: RateLimiter | None = None,
) -> RemoteReplayBuffer | ShardedReplayBuffer:
    """Connect to a store that `expstore serve` serves, or to several stores as the shards of one buffer.

    Args:
        url: Address of the store: `http://host:8420/name`. A list of addresses: the shards; their numbers are
            their positions in the list, which may also have buffers that this process has open. A path, or
            text without `://` that ends in `.json`: the cluster file
            that lists the shards, which may change while they are used.
        token: The access token; None to send none. A dict from hosts to tokens sends each token only to its
            hosts: `{"a": "...", "*.example.com": "..."}`; "*" stands for all hosts. One token is sent to the
            addresses that you pass. A cluster file's hosts, except this machine, need a dict.
        timeout: Seconds that connecting, the answer, and each part of it may take.
        retries: How long a request is repeated if it gets no answer, or the server asks for a retry, such as
            `expstore.remote.Retries(seconds=300)`. None: a minute.
        batch_size: Rows per batch of `sample` and iteration.
        sampler: How the rows of a batch are chosen: a dict with `kind` and parameters, a kind such as
            "prioritized" for its defaults, or the name of a sampler that the server keeps. Uniform by
            default. `kind` is "uniform", "prioritized", "slices", "prioritized_slices" or "recency".
        where: SQL condition of the rows to draw, with no function but `selection('name')`.
        seed: Seed of the draws: draw k of a seed is the same for all clients while the rows are the same.
            None: the store's own next draw, which is shared by all clients without a seed; for shards, a
            random seed.
        draw: Number of the first draw of the seed.
        wait: For one store, seconds that the server waits for rows if it cannot draw yet; None for 0. For
            shards, seconds for which requests to a shard that does not answer are repeated; None for those of
            `retries`, or without limit with `down="wait"`.
        device: Device of the returned batches.
        prefetch: Number of batches that an iteration over one store asks for at a time: the server draws them
            while earlier ones are used. None for 32.
        priority_key: The entry of a sample in which `update_priority` finds priorities.
        as_numpy: Whether `sample`, `stream` and iteration return nested dicts of NumPy arrays, in host
            memory, by default.
        ahead: For shards, number of batches that are drawn together; None for 4.
        down: For shards, what draws do if a shard does not answer: "raise" an error after `wait` seconds,
            "wait" for it without limit, or draw from the others at once ("partial"). None for "raise".
        by: For shards, "mass" to draw as from one store with all rows, or "member" to draw from the shards in
            fixed shares. None for "mass".
        p: Share of each shard with `by="member"`; None for equal shares.
        rate_limiter: For shards, an `expstore.SampleToInsertRatio` or another limiter, for the sums of all
            shards. All clients should get the same one, and the servers must count: `expstore serve
            --samples-per-insert RATIO --error-buffer inf`. None: only the servers' own limits.

    Returns:
        A buffer; close it, or use it in a `with` block.

    Raises:
        NotFoundError: The server has no such store, or there is no such cluster file.
        RemoteError: The server does not answer, or does not accept the token; see `status`.
        StateError: `token` is for hosts that only the cluster file names (kind "token"); nothing was sent.
        ArgumentError: `url` is not the URL of a store, or an argument is out of range or of no use here.

    Example:
        >>> from pathlib import Path
        >>> with expstore.connect("http://trainer:8420/demo", batch_size=256) as rb:
        ...     batch = rb.sample()
        >>> shards = ["http://a:8420/run", "http://b:8420/run"]
        >>> with expstore.connect(shards, batch_size=256, seed=0) as rb:
        ...     batch = rb.sample()
        >>> rb = expstore.connect(Path("cluster.json"), batch_size=256, seed=0)  # doctest: +SKIP
    """
    options = ConnectOptions(
        batch_size=batch_size, sampler=sampler, where=where, seed=seed, draw=draw, wait=wait, device=device,
        prefetch=prefetch, priority_key=priority_key, as_numpy=as_numpy, ahead=ahead, down=down, by=by, p=p,
        rate_limiter=rate_limiter,
    )  # fmt: skip
    if not isinstance(url, str) or (url.endswith(_CLUSTER_FILE) and "://" not in url):
        if not isinstance(url, list | tuple | str | PathLike):
            raise ArgumentError(
                f"url must be the address of a store, a list of addresses, or the path of a cluster file, "
                f"got {url!r}",
                hint="pass an address such as http://host:8420/name",
            )
        members: Members
        if isinstance(url, list | tuple):
            for place in url:
                if not isinstance(place, ReplayBuffer):
                    Address.of(place)
            members = FixedMembers(url)
        else:
            members = FileMembers(local_path(url))
        return ShardedReplayBuffer(members, options, token=token, timeout=timeout, retries=retries)
    options.check_one()
    address = Address.of(url)
    connection = Connection(address, Tokens(token, named=True).of(address), timeout=timeout, retries=retries)
    try:
        buffer = RemoteReplayBuffer(connection, options)
        connection.request("GET", "")
    except BaseException:
        connection.close()
        raise
    return buffer
