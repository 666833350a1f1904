"""Two actor processes feed one learner through a served store: CartPole, one client per process.

Run `python examples/http_actors.py`; it serves a temporary folder itself. To use a running server:
`expstore serve runs`, then `python examples/http_actors.py --url http://127.0.0.1:8420`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import gymnasium
import httpx
import torch
from tensordict import TensorDict

import expstore

STEPS = 64


def act(url: str, number: int, rows: int) -> None:
    """Collect steps of one environment and send them. Every call is stored exactly once."""
    env = gymnasium.make("CartPole-v1")
    generator = torch.Generator().manual_seed(number)
    observation, _ = env.reset(seed=number)
    with expstore.connect(url) as rb:
        for _ in range(rows // STEPS):
            steps = []
            for _ in range(STEPS):
                action = int(torch.randint(2, (), generator=generator))
                successor, reward, terminated, truncated, _ = env.step(action)
                done = terminated or truncated
                steps.append(
                    TensorDict(
                        {
                            "observation": torch.from_numpy(observation),
                            "action": torch.tensor(action),
                            "next": {
                                "observation": torch.from_numpy(successor),
                                "reward": torch.tensor([float(reward)]),
                                "terminated": torch.tensor([terminated]),
                                "done": torch.tensor([done]),
                            },
                        }
                    )
                )
                observation = env.reset()[0] if done else successor
            rb.extend(torch.stack(steps), source=f"actor-{number}")
    env.close()


def learn(url: str, updates: int) -> float:
    """Fit state values to batches from the store; return the last loss."""
    torch.manual_seed(0)
    value = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(value.parameters(), 1e-2)
    loss = torch.zeros(())
    with expstore.connect(url, batch_size=256, wait=60.0) as rb:
        # The first batch waits for the actors' first rows; the next ones are prefetched.
        for _, batch in zip(range(updates), rb, strict=False):
            with torch.no_grad():
                goes_on = ~batch["next", "terminated"]
                target = batch["next", "reward"] + 0.9 * value(batch["next", "observation"]) * goes_on
            loss = torch.nn.functional.mse_loss(value(batch["observation"]), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return float(loss.detach())


@contextmanager
def serving(url: str | None) -> Iterator[str]:
    """Yield the address of a server: the given one, or one that serves a temporary folder."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "expstore", "serve", folder, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            found = re.search(r"http://\S+:\d+", server.stdout.readline())
            assert found is not None, "the server did not start"
            try:
                yield found[0]
            finally:
                server.terminate()


def main() -> None:
    """Start two actors, learn from their rows, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="address of a server; by default one is started")
    parser.add_argument("--rows", type=int, default=2048, help="of each actor")
    parser.add_argument("--updates", type=int, default=300)
    wanted = parser.parse_args()
    with serving(wanted.url) as url:
        httpx.put(f"{url}/v1/stores/actors", json={"capacity": 100_000})  # it may exist already
        store = f"{url}/actors"
        actors = [
            multiprocessing.get_context("spawn").Process(target=act, args=(store, number, wanted.rows))
            for number in (1, 2)
        ]
        for actor in actors:
            actor.start()
        loss = learn(store, wanted.updates)
        for actor in actors:
            actor.join()
        with expstore.connect(store) as rb:
            told = rb.sql("SELECT source, count(*), avg(length) FROM episodes GROUP BY 1 ORDER BY 1")
            print(f"loss {loss:.2f} after {wanted.updates} updates, {len(rb)} rows")
            for source, episodes, length in told.fetchall():
                print(f"{source}: {episodes} episodes of {length:.1f} steps")


if __name__ == "__main__":
    main()
