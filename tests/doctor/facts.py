"""What a healthy host tells, for tests that change one thing in it."""

from __future__ import annotations

import copy
from typing import Any

GIB = 1 << 30

# Printed by nvidia-smi 580 on a machine with two GPUs.
SMI = {
    "gpus": "0, GPU-7c4560ef, NVIDIA H200, 580.159.04, 143771, 143156, Default, Disabled\n"
    "1, GPU-f6c28388, NVIDIA H200, 580.159.04, 143771, 143156, Default, Disabled\n",
    "apps": "",
    "topology": "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\t0-31\t0\t\tN/A\nGPU1\tNV18\t X \t0-31\t0\t\tN/A\n\nLegend:\n\n  X    = "
    "Self\n  NV#  = Connection ...\n",
    "peers": " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = "
    "Self\n  OK   = Status Ok\n",
    "overview": "| NVIDIA-SMI 580.159.04             Driver Version: 580.159.04     CUDA Version: "
    "13.0     |\n",
}

FACTS: dict[str, Any] = {
    "hostname": "d1",
    "executable": "/opt/venv/bin/python",
    "versions": {
        "Python": "3.11.7",
        "torch": "2.13.0",
        "allhands": "0.1.0",
        "numpy": "2.4.6",
        "CUDA": "12.8",
    },
    "rsync": "3.2.7",
    "own_name": {"addresses": ["10.0.0.1"], "error": None},
    "interfaces": [
        {"name": "eth0", "addresses": ["10.0.0.1"], "speed": 10000, "virtual": False, "mtu": 1500}
    ],
    "variables": {},
    "nvidia_smi": SMI,
    "infiniband": [],
    "shm": {"total": 8 * GIB, "free": 8 * GIB, "files_free": None},
    "open_files": [1024, 1048576],
    "memlock": 8 << 20,
    "cores": 8,
    "core_quota": None,
    "memory": {"total": 64 * GIB, "free": 60 * GIB},
}


def facts(**changes: Any) -> dict[str, Any]:
    """Those facts with some of them changed; `a__b=…` changes `b` within `a`."""
    changed = copy.deepcopy(FACTS)
    for name, value in changes.items():
        *outer, last = name.split("__")
        place = changed
        for key in outer:
            place = place[key]
        place[last] = value
    return changed
