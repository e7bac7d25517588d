"""MXNet's own key-value store, timed for benchmarks/kvstore.py with the Python of an environment
that has MXNet 1.9.1."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path

SCRIPT = """
import json, os, sys, time
import mxnet as mx  # with DMLC_ROLE=server or scheduler this never returns
count, runs, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = mx.kv.create("dist_sync")
store.init("key", mx.nd.zeros((count,)))
value, out, seconds = mx.nd.ones((count,)) * (1 + store.rank), mx.nd.zeros((count,)), []
mx.nd.waitall()
for run in range(runs + 2):
    store._barrier()
    began = time.perf_counter()
    store.pushpull("key", value, out=out)
    out.wait_to_read()
    if run > 1:
        seconds.append(time.perf_counter() - began)
    assert out[0].asscalar() > 0
with open(os.path.join(path, str(store.rank)), "w") as file:
    json.dump(seconds, file)
"""


def _port() -> int:
    with socket.socket() as probe:  # MXNet can only be told a number
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pushpull(python: str, count: int, runs: int, workers: int, servers: int) -> list[float]:
    """Seconds of each push plus pull of `count` floats, of the slower worker."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "peer.py"
        script.write_text(SCRIPT)
        env = {
            **os.environ,
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(_port()),
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
        }
        command = [python, str(script), str(count), str(runs), folder]
        roles = ["scheduler", *["server"] * servers, *["worker"] * workers]
        started = [
            subprocess.Popen(
                command,
                env={**env, "DMLC_ROLE": role},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for role in roles
        ]
        try:
            for process in started[-workers:]:
                process.wait(120)
        finally:
            for process in started:
                process.kill()
                process.wait()
        times = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(workers)]
    return [max(both) for both in zip(*times, strict=True)]
