#!/bin/sh
# A researcher's first hour with a script of others, in an empty folder: run by many workers as it
# is, moved to a loop of allhands, proven, and its weights taken along.
# `sh tests/walks/researcher.sh EXAMPLES`, where EXAMPLES is the folder of that name here, with
# allhands[data] installed.
set -eu
examples=$1

# Their script is for torchrun, and runs as it is.
cp "$examples/moving/ddp_before.py" theirs.py
allhands launch -n 2 theirs.py

# The same in a loop of allhands: by one process, by two, and is it the same?
cp "$examples/moving/ddp_after.py" ours.py
allhands launch -n 2 ours.py
allhands verify ours.py --workers 1,2 --steps 3
allhands show logs/ddp

# The weights, for anywhere.
allhands export logs/ddp/checkpoints/last -o weights.safetensors
python -c '
from safetensors.torch import load_file
for name, tensor in load_file("weights.safetensors").items():
    print(name, list(tensor.shape))
'
