"""Pipeline parallelism: consecutive layers on each worker, and micro-batches that go through them
one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from allhands.checks import check_choice, check_whole
from allhands.comm import all_reduce_sum
from allhands.data import share_of
from allhands.errors import UserError, kind_of
from allhands.strategies.degrees import Degrees
from allhands.strategies.meshed import Meshed
from allhands.strategies.pipeline_parts import Part, by_parameters, chain_of, cut, measured_on
from allhands.strategies.pipeline_run import (
    SCHEDULES,
    Autocast,
    Forward,
    LossOf,
    MicroBatch,
    PipelineRun,
    fits,
)
from allhands.strategies.pipeline_stage import Ghost, check_all_used, rows_of, shared_parameters
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
            and backward pass on the first samples of the training data, the mean over the workers.
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
        self.stages, self.schedule, self.microbatches, self.balance = (
            stages,
            schedule,
            microbatches,
            balance,
        )
        self.stages_per_worker = stages_per_worker or (2 if schedule == "interleaved" else 1)
        self.shared: dict[str, list[int]] = {}

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

    def cut(self, model: nn.Module, mesh: DeviceMesh, world: World) -> list[nn.Module]:
        """This rank's stages, each as a module that has its share of `model` under the model's own
        names."""
        parts, workers, group = chain_of(model), mesh.size(), mesh.get_group()
        stages = self._cut(model, parts, workers, lambda: self._costs(model, parts, world))
        shared = shared_parameters(model, stages)
        self._names: dict[str, str] = {}
        self.shared = {}
        for name, where in shared.items():
            ranks = sorted({stage % workers for stage in where})
            if len(ranks) < len(where):
                raise UserError(
                    f"the parameter '{name}' is used by the stages "
                    f"{', '.join(map(str, sorted(where)))}, of which one worker has "
                    "two. Write schedule='1f1b', or name stages that keep its uses together"
                )
            self.shared[name] = ranks
            self._names |= {
                own: name
                for stage, own in where.items()
                if stage % workers == mesh.get_local_rank()
            }
        self.passes = PipelineRun(
            model, stages, Ghost(model, stages, world.device), group, world.device, self.schedule
        )
        self._batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
        return self.passes.chunks

    def _costs(self, model: nn.Module, parts: list[Part], world: World) -> list[float]:
        if self.balance == "parameters":
            return by_parameters(model, parts)
        assert self.try_on is not None
        costs = torch.tensor(
            measured_on(
                self.try_on, model, parts, self.micro_batches(self.degrees.pp), world.device
            )
        )
        costs = costs.to(world.device, torch.float64)
        all_reduce_sum([costs], world)
        return costs.tolist()

    def staged(self) -> nn.Module:
        """What the runner sees of the model; after the chunks of `cut` are sharded."""
        return self.passes.model(self._names)

    # ------------------------------------------------------------------ a step

    @property
    def drives(self) -> bool:
        return self.degrees.pp > 1

    def divide(
        self, batches: Sequence[Any], counts: Sequence[int]
    ) -> tuple[Sequence[Any], Sequence[int]]:
        sizes = self._sizes_on_all(counts) if self.degrees.shard > 1 else counts
        self._sizes, divided, real = [], [], []
        for batch, count, size in zip(batches, counts, sizes, strict=True):
            pieces = min(self.micro_batches(self.degrees.pp), size)
            for piece in range(pieces):
                start, stop = share_of(size, piece, pieces)
                own = max(0, min(count, stop) - start)
                # One that has no sample of its own is given one that does not count.
                rows = slice(start, start + own) if own else slice(0, 1)
                divided.append(rows_of(batch, rows, max(count, 1)))
                real.append(own)
                self._sizes.append(stop - start)
        return divided, real

    def _sizes_on_all(self, counts: Sequence[int]) -> list[int]:
        """The largest of all ranks' batches, one by one: fully_shard's collectives must match,
        micro-batch by micro-batch."""
        both = torch.tensor(
            [[count, -count] for count in counts], dtype=torch.int64, device=self.passes.device
        )
        for axis in ("dp_shard", "dp_replicate"):
            if self.whole_mesh[axis].size() > 1:
                dist.all_reduce(both, dist.ReduceOp.MAX, group=self.whole_mesh.get_group(axis))
        largest, smallest = both[:, 0].tolist(), (-both[:, 1]).tolist()
        if self._batch_norm and largest != smallest:
            raise UserError(
                "the workers have different numbers of samples in this step, and a pipeline with "
                "shards fills them up, which BatchNorm's statistics would see. Write "
                "drop_last=True for this loader, or use GroupNorm"
            )
        return largest

    def forward_backward(
        self,
        batches: Sequence[Any],
        counts: Sequence[int],
        forward: Forward,
        loss_of: LossOf,
        autocast: Autocast,
    ) -> None:
        micro_batches = []
        for batch, count, size in zip(batches, counts, self._sizes, strict=True):
            held = max(count, 1)
            filled = (
                batch
                if held == size
                else rows_of(batch, torch.arange(size).clamp(max=held - 1), held)
            )
            micro_batches.append(MicroBatch(batch, filled, count))
        self.passes.forward_backward(micro_batches, forward, loss_of, autocast)
