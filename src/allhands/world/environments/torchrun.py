"""torchrun's variables, which `allhands launch`, Kubernetes operators and hand-written scripts also
set."""

from __future__ import annotations

from allhands.errors import UserError, WorldError
from allhands.world.environments.base import Environment
from allhands.world.layout import Environ, Layout, Meeting, need_int, read_int, read_port


class Torchrun(Environment):
    """RANK and WORLD_SIZE say who we are; MASTER_ADDR and MASTER_PORT where we meet; LOCAL_* may be
    unset."""

    name = "torchrun"

    def detected(self, environ: Environ) -> bool:
        return bool(environ.get("RANK", "").strip() and environ.get("WORLD_SIZE", "").strip())

    def layout(self, environ: Environ) -> Layout:
        because = "torchrun's variables say that this process is one of several"
        layout = Layout(
            rank=need_int(environ, "RANK", because),
            world_size=need_int(environ, "WORLD_SIZE", because),
            local_rank=read_int(environ, "LOCAL_RANK"),
            local_world_size=read_int(environ, "LOCAL_WORLD_SIZE"),
            node_rank=read_int(environ, "GROUP_RANK"),
            num_nodes=read_int(environ, "GROUP_WORLD_SIZE"),
            environment="allhands launch" if environ.get("ALLHANDS_LAUNCH") == "1" else self.name,
        )
        _check_against_slurm(environ, layout)
        return layout

    def meeting(self, environ: Environ, layout: Layout) -> Meeting:
        host, port = environ.get("MASTER_ADDR", "").strip(), read_port(environ)
        absent = [
            name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value
        ]
        if absent:
            raise UserError(
                f"RANK={layout.rank} and WORLD_SIZE={layout.world_size} are set, but "
                f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not: set "
                "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, or unset "
                "RANK and WORLD_SIZE to train alone."
            )
        return Meeting(
            hosts=(host,),
            port=port,
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=read_int(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
        )


def _check_against_slurm(environ: Environ, layout: Layout) -> None:
    """Inside srun, the torchruns of all tasks make one world; the usual slip is one world a
    task."""
    tasks = read_int(environ, "SLURM_STEP_NUM_TASKS")
    if tasks is None or tasks < 2 or layout.environment == "allhands launch":
        return
    agents = layout.num_nodes
    if tasks in {agents, layout.world_size}:
        return
    told = f"GROUP_WORLD_SIZE={agents}" if agents is not None else f"WORLD_SIZE={layout.world_size}"
    raise WorldError(
        f"srun started {tasks} tasks (SLURM_STEP_NUM_TASKS={tasks}), but torchrun's variables say "
        f"{told}: these would be separate worlds that each train alone. Start one torchrun a node "
        f"(srun --ntasks-per-node=1 torchrun --nnodes={tasks} --rdzv-backend=c10d "
        "--rdzv-endpoint=HOST:PORT …), or leave torchrun out and let srun start the workers."
    )
