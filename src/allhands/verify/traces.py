"""What the runs of a comparison are asked for, and what they record."""

from __future__ import annotations

from dataclasses import dataclass, field

from allhands.verify.recorder import Step


@dataclass
class Variation:
    """What is different in one run of the user's training.

    Attributes:
        steps: optimizer steps to take.
        alone_for: train in one process, on the global batches of so many workers; 0 leaves the
            batches as they are.
        cut: alone, cut each global batch in so many micro-batches.
        reverse: take the samples of each global batch in reverse order.
        double: weights and inputs in float64, without autocast.
        frozen: modules that stay in evaluation mode: "batchnorm", "dropout", "all" or "".
        drop_last: leave out a last global batch that is short.
        stream: added to the number of the stream from which the global generators draw.
        by_rank: also call each step function once on every rank with the same batch.
    """

    steps: int
    alone_for: int = 0
    cut: int = 1
    reverse: bool = False
    double: bool = False
    frozen: str = ""
    drop_last: bool = False
    stream: int = 0
    by_rank: bool = False


@dataclass
class Trace:
    """What a run did; made of plain data.

    Attributes:
        steps: see `Recorder`.
        orders: a checksum of the order of each epoch, by loader and epoch.
        failure: the `WorldError` that ended the run early, or "".
        unwrapped: the module that the strategy gave to call was never called.
        draws: of a script, the lines that draw from a global random generator in the loop.
        collectives: of a script, those that call torch.distributed in the loop.
        by_rank: see `Variation`: the losses by rank, for each step function.
    """

    steps: list[Step]
    orders: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    unwrapped: bool = False
    draws: list[str] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    by_rank: dict[str, list[float]] = field(default_factory=dict)

    def number(self, index: int) -> int:
        """Of the step with this index, among those of its optimizer."""
        return int(self.steps[index]["number"]) if index < len(self.steps) else index + 1

    def optimizer(self, index: int) -> str:
        """The name of the optimizer that took the step with this index; "" where there is one."""
        return str(self.steps[index]["optimizer"]) if index < len(self.steps) else ""

    def step_name(self, index: int) -> str:
        """The step with this index, in words."""
        optimizer = self.optimizer(index)
        return f"step {self.number(index)}" + (f" of '{optimizer}'" if optimizer else "")


@dataclass
class Subject:
    """What is known of a training before it is compared.

    Attributes:
        floor: the least noise that is assumed, see `floor_of`.
        plausible: how far rounding alone can possibly take the loss and the gradients of the first
            step, relatively.
        in_double: whether a run in float64 says anything.
        parameters: how many are trained.
        own_batches: each rank makes its batches itself.
        modules: the names of BatchNorm and Dropout modules, by "batchnorm" and "dropout".
        calls: what calls the model in a step, for advice.
    """

    floor: float
    plausible: float
    in_double: bool
    parameters: int
    modules: dict[str, list[str]]
    calls: str = "handle_batch"
    own_batches: bool = False
