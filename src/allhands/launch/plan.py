"""What to start, and the variables that tell each worker who it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from allhands.launch.protocol import MARK


@dataclass(frozen=True)
class Command:
    """What every worker runs.

    Attributes:
        kind: "script" (a Python file, or a folder or zip file with `__main__.py`), "module" (as `python -m`),
            or "program" (anything else that can be executed).
        target: the path, module name or program.
        args: its arguments, passed on unchanged.
    """

    kind: Literal["script", "module", "program"]
    target: str
    args: tuple[str, ...] = ()

    def task(self) -> dict[str, Any]:
        """The command as the keeper expects it."""
        if self.kind == "program":
            return {"program": [self.target, *self.args]}
        return {self.kind: self.target, "args": list(self.args)}


def environment(
    rank: int,
    world_size: int,
    *,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    address: str,
    port: int,
    run_id: str,
    restarts: int = 0,
) -> dict[str, str]:
    """The variables of one worker: torchrun's, so that `allhands.init()` and plain torch.distributed both
    understand.

    TORCHELASTIC_USE_AGENT_STORE makes torch connect to the store at `address:port` instead of opening one in
    rank 0.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(node_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        MARK: "1",
    }
