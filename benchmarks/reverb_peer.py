"""Rows per second of Reverb's own client; run by an interpreter that has dm-reverb.

Run by `benchmarks/remote.py`, which reads the last line: JSON with rows per second by way of reading. The
server is a separate process. Rows are those of LOCOMOTION; nothing of expstore is imported.
"""

import json
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROWS = 20_000
FIELDS = {
    "observation": ("float32", (17,)),
    "action": ("float32", (6,)),
    "traj_ids": ("int64", ()),
    "next_observation": ("float32", (17,)),
    "reward": ("float32", (1,)),
    "done": ("bool", (1,)),
    "terminated": ("bool", (1,)),
    "truncated": ("bool", (1,)),
    "next_done": ("bool", (1,)),
    "next_terminated": ("bool", (1,)),
    "next_truncated": ("bool", (1,)),
}


def serve():
    """Serve one uniform table until the other end of the pipe is closed."""
    import reverb

    table = reverb.Table(
        name="rows",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=ROWS,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table])
    print(server.port, flush=True)
    sys.stdin.read()
    server.stop()


def fill(client):
    """Insert the rows one by one, as Reverb's writers do."""
    import numpy as np

    rng = np.random.default_rng(0)
    columns = {
        name: (
            rng.standard_normal((ROWS, *shape)) if dtype == "float32" else np.zeros((ROWS, *shape))
        ).astype(dtype)
        for name, (dtype, shape) in FIELDS.items()
    }
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for row in range(ROWS):
            writer.append({name: column[row] for name, column in columns.items()})
            writer.create_item("rows", 1.0, {name: column[-1:] for name, column in writer.history.items()})
            if row % 40 == 39:
                writer.flush()


def rate(batches, rows, seconds):
    """Return the rows per second of an iterator of batches."""
    iterator = iter(batches)
    for _ in range(10):
        next(iterator)
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        next(iterator)
        count += rows
    return count / passed


def main(batch, seconds):
    """Serve, fill, and read in both of Reverb's ways."""
    import reverb
    import tensorflow as tf

    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        address = f"localhost:{int(server.stdout.readline())}"
        client = reverb.Client(address)
        fill(client)
        dataset = reverb.TimestepDataset(
            address,
            "rows",
            dtypes={name: tf.as_dtype(dtype) for name, (dtype, _) in FIELDS.items()},
            shapes={name: tf.TensorShape(shape) for name, (_, shape) in FIELDS.items()},
            max_in_flight_samples_per_worker=2 * batch,
        ).batch(batch)
        told = {
            "dataset": rate(dataset, batch, seconds),
            "client": rate(client.sample("rows", 10**9), 1, seconds),
        }
        server.stdin.close()
        server.terminate()
    print(json.dumps(told))


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve()
    else:
        main(int(sys.argv[1]), float(sys.argv[2]))
