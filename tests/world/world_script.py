"""What the process tests start: `init` with the keyword arguments given as JSON, one all-reduce,
and what came of it."""

from __future__ import annotations

import json
import os
import sys


def forked(variables: dict[str, str], asked: str, out: str, err: str) -> None:
    """What a script started with these variables and this argument does, in a process that was
    forked; output goes to files."""
    os.environ.clear()
    os.environ.update(variables)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.argv = [__file__, asked]
    main()


def main() -> None:
    import torch
    import torch.distributed as dist

    import allhands

    asked = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    try:
        world = allhands.init(**{"timeout": 30, **asked})
    except allhands.AllhandsError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        sys.exit(3)
    assert allhands.init() is world
    total = torch.tensor([float(world.rank + 1)], device=world.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    told = {
        name: getattr(world, name)
        for name in ("rank", "local_rank", "node_rank", "world_size", "local_world_size")
    }
    told |= {
        "backend": world.backend,
        "environment": world.environment,
        "device": str(world.device),
    }
    print(json.dumps(told | {"sum": total.item(), "main": world.is_main}), flush=True)
    allhands.finalize()
    allhands.finalize()
    assert allhands.current_world() is None
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
