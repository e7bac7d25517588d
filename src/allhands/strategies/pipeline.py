"""Pipeline parallelism: consecutive layers on each worker, and micro-batches that go through them
one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from allhands.checks import check_choice, check_whole
from allhands.comm import all_reduce_sum
from allhands.compat import BatchNormBase
from allhands.errors import UserError, kind_of
from allhands.strategies.base import TryOn
from allhands.strategies.degrees import Degrees
from allhands.strategies.meshed import Meshed
from allhands.strategies.pipeline_costs import by_parameters, measured_on
from allhands.strategies.pipeline_parts import Part, chain_of, cut
from allhands.strategies.pipeline_passes import PipelinePasses
from allhands.strategies.pipeline_run import SCHEDULES, PipelineRun, fits
from allhands.strategies.pipeline_stage import Ghost, check_all_used, shared_parameters
from allhands.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Stages = str | Sequence[str] | Callable[[nn.Module, int], Sequence[str]]


class Pipeline(Meshed):
    """Consecutive layers on each worker; each batch is cut into micro-batches, which pass through
    the workers in turn.

    Stands on torch.distributed.pipelining. The model's forward must be a chain of its children: an
    ``nn.Sequential``, a forward that calls children one after another, or a model with a method
    ``chain()`` that names its parts (as `models.GPT` has). It is cut so that the most expensive
    stage is as cheap as possible.

    The gradient is that of the whole batch, whether or not the micro-batches divide it. BatchNorm
    computes its statistics over each micro-batch, as it does with ``accumulate``, and so depends on
    their number.

    Args:
        stages: "auto"; or the names of the parts at which the second and later stages begin; or a
            function ``(model, number of stages)`` that gives those names.
        schedule: "gpipe" (all forward passes, then all backward passes; Huang et al. 2019), "1f1b"
            (alternating, so that a stage keeps the activations of few micro-batches; Narayanan et
            al. 2019), "interleaved" (1F1B with several stages a worker; Narayanan et al. 2021),
            "zero_bubble" (weights' gradients fill the gaps, ZB1P; Qi et al. 2023).
        microbatches: how many each batch is cut into; None takes twice the number of workers along
            the pipeline.
        balance: "parameters": a part costs what it has of them; "measured": the time of its forward
            and backward pass on the first samples of the training data, the mean over the workers;
            the last part has the loss too.
        stages_per_worker: for "interleaved" and "zero_bubble"; None takes 2 and 1.

    Raises:
        UserError: an argument is none of these.
    """

    name = "pipeline"

    def __init__(
        self,
        stages: Stages = "auto",
        schedule: str = "1f1b",
        microbatches: int | None = None,
        balance: str = "parameters",
        stages_per_worker: int | None = None,
    ) -> None:
        if isinstance(stages, str) and stages != "auto":
            raise UserError(
                f"Pipeline(stages={stages!r}): write 'auto', a list of names, stages=[{stages!r}], "
                "or a function"
            )
        if not callable(stages) and not (
            isinstance(stages, (str, list, tuple)) and all(isinstance(s, str) for s in stages)
        ):
            raise UserError(
                f"Pipeline(stages=…) is {kind_of(stages)}; write 'auto', a list of names of parts, "
                "or a function"
            )
        check_choice("schedule", schedule, SCHEDULES, of="Pipeline")
        check_choice("balance", balance, ("parameters", "measured"), of="Pipeline")
        for key, value in (
            ("microbatches", microbatches),
            ("stages_per_worker", stages_per_worker),
        ):
            check_whole(key, value, of="Pipeline", otherwise="None")
        if stages_per_worker not in (None, 1) and schedule in ("gpipe", "1f1b"):
            raise UserError(
                f"Pipeline(schedule='{schedule}') has one stage a worker; write "
                f"schedule='interleaved' for {stages_per_worker}, or leave stages_per_worker out"
            )
        if schedule == "zero_bubble" and tuple(map(int, torch.__version__.split(".")[:2])) < (
            2,
            13,
        ):
            raise UserError(
                f"Pipeline(schedule='zero_bubble') needs PyTorch 2.13; {torch.__version__} may "
                "count the gradient of a parameter "
                "that a stage uses twice too often. Write schedule='1f1b'"
            )
        self.pipeline = self
        self.stages, self.schedule, self.microbatches = stages, schedule, microbatches
        self.balance = balance
        self.stages_per_worker = stages_per_worker or (2 if schedule == "interleaved" else 1)

    def degrees_for(self, workers: int) -> Degrees:
        return Degrees(pp=workers)

    # ------------------------------------------------------------------ cutting

    def micro_batches(self, workers: int) -> int:
        """How many each batch is cut into."""
        return self.microbatches or 2 * workers

    def check_model(self, model: nn.Module, workers: int) -> None:
        """Raise `UserError` when the model cannot be cut for so many workers along the pipeline."""
        parts = chain_of(model)
        check_all_used(model, parts)
        self._cut(model, parts, workers, lambda: by_parameters(model, parts))
        count = self.micro_batches(workers)
        if not fits(self.schedule, count, workers):
            multiple = -(-count // workers) * workers
            raise UserError(
                f"Pipeline(schedule='{self.schedule}', microbatches={count}) does not go with "
                f"{workers} workers along the pipeline, of which it wants "
                f"{'at least as many' if self.schedule == '1f1b' else 'a multiple'}. Set "
                f"microbatches to {multiple}, or schedule to 'gpipe'"
            )

    def check_shards(self) -> None:
        """Raise `UserError` when stages that are sharded, too, would not be trained right."""
        if self.schedule == "zero_bubble":
            raise UserError(
                "Pipeline(schedule='zero_bubble') computes the gradients of weights past the hooks "
                "by which fully_shard "
                "exchanges them. Set schedule to 'interleaved' or '1f1b', or dp to {'replicate': …}"
            )

    def _cut(
        self,
        model: nn.Module,
        parts: list[Part],
        workers: int,
        costs: Callable[[], Sequence[float]],
    ) -> list[list[Part]]:
        return cut(parts, workers * self.stages_per_worker, self.stages, costs, model)

    def cut(
        self, model: nn.Module, mesh: DeviceMesh, world: World, try_on: TryOn | None
    ) -> PipelinePasses:
        """This rank's stages, each as a module that has its share of `model` under the model's own
        names, and what runs them.

        Args:
            model: the whole model.
            mesh: with the axis pp, along which it is cut.
            world: all ranks.
            try_on: calls a module on a micro-batch of the training data, for "measured".
        """
        line = mesh["pp"]
        parts, workers = chain_of(model), line.size()
        stages = self._cut(
            model, parts, workers, lambda: self._costs(model, parts, workers, world, try_on)
        )
        names: dict[str, str] = {}
        shared = {}
        for name, where in shared_parameters(model, stages).items():
            ranks = sorted({stage % workers for stage in where})
            if len(ranks) < len(where):
                raise UserError(
                    f"the parameter '{name}' is used by the stages "
                    f"{', '.join(map(str, sorted(where)))}, of which one worker has "
                    "two. Write schedule='1f1b', or name stages that keep its uses together"
                )
            shared[name] = ranks
            names |= {
                own: name
                for stage, own in where.items()
                if stage % workers == line.get_local_rank()
            }
        run = PipelineRun(
            model,
            stages,
            Ghost(model, stages, world.device),
            line.get_group(),
            world.device,
            self.schedule,
        )
        batch_norm = any(isinstance(module, BatchNormBase) for module in model.modules())
        return PipelinePasses(run, self.micro_batches(workers), mesh, names, shared, batch_norm)

    def _costs(
        self, model: nn.Module, parts: list[Part], workers: int, world: World, try_on: TryOn | None
    ) -> list[float]:
        if self.balance == "parameters":
            return by_parameters(model, parts)
        assert try_on is not None
        costs = torch.tensor(
            measured_on(try_on, model, parts, self.micro_batches(workers), world.device)
        )
        costs = costs.to(world.device, torch.float64)
        all_reduce_sum([costs], world)
        return costs.tolist()
