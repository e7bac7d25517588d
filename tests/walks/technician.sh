#!/bin/sh
# How the technician of a hospital joins a federated training, in an empty folder and with made-up
# rows, all on one machine: first in one place, then keys, a dry run, the sites, the server's page.
# `sh technician.sh`, with allhands[flower] installed. PORT is the server's; default 8000.
set -eu
port=${PORT:-8000}
server=127.0.0.1:$port
pids=
trap 'kill $pids 2>/dev/null || true; wait' EXIT

cat > own.py <<'END'
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset


def load(root=None):
    if root is None:  # the server has no data
        return {}
    x, y = (torch.from_numpy(np.load(Path(root, f"{name}.npy"))) for name in "xy")
    return {"train": TensorDataset(x[10:], y[10:]), "valid": TensorDataset(x[:10], y[:10])}
END
cat > run.yml <<'END'
data: {name: "own.py:load", batch_size: 8}
model: {name: mlp, in_features: 6, hidden: [9], out_features: 2}
optimizer: {name: sgd, lr: 0.1}
strategy:
  name: federated
  rounds: 2
  sites: {names: [north, east], wait: 300}
device: cpu
workers: 1
logdir: logs
END
python -c '
import pathlib, numpy
for seed, name in enumerate(["north", "east"]):
    folder = pathlib.Path("data", name)
    folder.mkdir(parents=True)
    x = numpy.random.default_rng(seed).standard_normal((40, 6), dtype=numpy.float32)
    numpy.save(folder / "x.npy", x)
    numpy.save(folder / "y.npy", (x[:, 0] > 0).astype(numpy.int64))
'

# In one place first.
allhands federated simulate -C run.yml --data data

# Keys, for a trial; and what would leave this site?
allhands federated certificates --out keys --host 127.0.0.1 --site north --site east > keys.txt
allhands federated site -C run.yml --server "$server" --data data/north --name north \
    --key keys/sites/north.key --authority keys/authority.crt --dry-run

# The run itself, with a page.
for name in north east; do
    allhands federated site -C run.yml --server "$server" --data "data/$name" --name "$name" \
        --key "keys/sites/$name.key" --authority keys/authority.crt > "$name.log" 2>&1 &
    pids="$pids $!"
done
allhands federated server -C run.yml --port "$port" --page 0 --sites keys/sites.txt \
    --certificate keys/server.crt --key keys/server.key --authority keys/authority.crt \
    > server.log 2>&1 &
serves=$!
pids="$pids $serves"
until page=$(grep -o 'http://127[^ ]*' server.log); do
    kill -0 $serves
    sleep 0.1
done
python -c '
import sys, urllib.error, urllib.request
with urllib.request.urlopen(sys.argv[1]) as reply:
    print("the page says:", "Federated training" in reply.read().decode())
try:
    urllib.request.urlopen(sys.argv[1][:-3])
except urllib.error.HTTPError as error:
    print("without its token:", error.code)
' "$page"
wait $serves
cat server.log

allhands show logs
allhands compare logs/simulated logs
