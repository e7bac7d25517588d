"""Whether a training has its model compiled: by the steps that are left, and by what it gave."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from allhands.step import compile_choice
from allhands.step.compile_choice import CompileChoice
from allhands.world import World, current_world
from tests.reference import relative_difference
from tests.step.captured_steps import Trained, data, network
from tests.worlds import in_world

WORLD = World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "alone")
STEPS = 200


class Marked(AbstractContextManager[None]):
    """Stands for a model that is compiled, which is what `log` says."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        self.log.append("enters")

    def __exit__(self, *error: Any) -> None:
        self.log.append("leaves")


class Times:
    """Steps take `before` seconds, and `after` where the model is compiled."""

    def __init__(self, log: list[str], before: float, after: float | None) -> None:
        self.log, self.before, self.after = log, before, after
        self.marks = 0

    def mark(self) -> None:
        self.marks += 1

    def restart(self) -> None:
        self.marks = 0

    def median(self) -> float | None:
        if self.marks < 20:
            return None
        return self.after if self.log[-1:] == ["enters"] else self.before


def alike(rounded: bool) -> list[torch.Tensor]:
    """The losses and gradients of a step, compiled or not."""
    return [torch.ones(1), torch.ones(3)]


def taken(
    monkeypatch: pytest.MonkeyPatch,
    before: float,
    after: float | None,
    left: int | None,
    able: bool = True,
) -> tuple[list[str], list[str], list[int]]:
    """What was entered and left, what was said, and after which of 200 steps the kind changed."""
    log: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(compile_choice, "StepTimes", lambda device: Times(log, before, after))
    choice = CompileChoice(lambda: Marked(log), 10, lambda: left, WORLD, said.append, able)
    with choice:
        changed = [
            number
            for number in range(1, STEPS + 1)
            if choice.step_taken(after is not None or not choice.active, alike)
        ]
    return log, said, changed


def test_what_pays_is_compiled_and_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 layers are taken to compile in 20 s; a quarter of 20,000 steps of 10 ms is 50 s."""
    log, said, changed = taken(monkeypatch, 0.010, 0.007, 20_000)
    assert log == ["enters", "leaves"]  # when the training ends
    assert changed == [40]
    assert said[0].startswith("step: 20,000 steps of 10 ms are left, so that torch.compile is")
    assert said[1] == "step: compiled, 7 ms in place of 10"


def test_what_gives_nothing_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log, said, changed = taken(monkeypatch, 0.010, 0.0098, 20_000)
    assert changed == [40, 80]
    assert log == ["enters", "leaves"]
    assert said[1] == (
        "step: compiled no longer, since such steps take 9.8 ms; before, they took 10"
    )


def test_what_cannot_be_captured_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _, said, changed = taken(monkeypatch, 0.010, None, 20_000)
    assert changed == [40, 80]
    assert "since such steps cannot be captured" in said[1]


@pytest.mark.parametrize("left", [15_000, None], ids=["too few", "unknown"])
def test_nothing_is_compiled_for(monkeypatch: pytest.MonkeyPatch, left: int | None) -> None:
    assert taken(monkeypatch, 0.010, 0.001, left) == ([], [], [])


def test_nothing_is_compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, 0.010, 0.001, 20_000, able=False) == ([], [], [])


def test_what_was_compiled_before_an_interruption_is_compiled_at_once() -> None:
    log: list[str] = []
    choice = CompileChoice(lambda: Marked(log), 10, lambda: 10, WORLD, [].append)
    with choice:
        choice.begin()
        assert choice.active
        assert not any(choice.step_taken(True, alike) for _ in range(STEPS))
    assert log == ["enters", "leaves"]


def still_network() -> nn.Module:
    """It draws nothing, which on a processor would keep its steps eager."""
    return nn.Sequential(*(layer for layer in network() if not isinstance(layer, nn.Dropout)))


@pytest.mark.parametrize("after", [0.007, 0.02], ids=["kept", "taken back"])
def test_steps_stay_those_of_the_training(monkeypatch: pytest.MonkeyPatch, after: float) -> None:
    """No step is lost or taken twice while it is decided, and captures begin anew."""
    log: list[str] = []
    monkeypatch.setattr(compile_choice, "StepTimes", lambda device: Times(log, 0.01, after))
    one = Trained(still_network(), torch.optim.AdamW, {"lr": 1e-3})
    other = Trained(still_network(), torch.optim.AdamW, {"lr": 1e-3}, captured=False)
    assert one.captured is not None
    one.captured.choice = CompileChoice(
        lambda: Marked(log), 2, lambda: 10**6, WORLD, one.said.append
    )
    one.steps(data(100))
    other.steps(data(100))
    assert one.graphs.captures == (2 if after < 0.01 else 3)
    assert one.losses == pytest.approx(other.losses, rel=1e-5)
    assert relative_difference(one.model.state_dict(), other.model.state_dict()) < 1e-5


class Changed(Marked):
    """Stands for a model that is compiled, whose forward pass is another one then."""

    def __init__(self, log: list[str], model: nn.Module, forward: Any) -> None:
        super().__init__(log)
        self.model, self.forward = model, forward

    def __enter__(self) -> None:
        super().__enter__()
        plain = self.model.forward
        self.model.forward = lambda *given: self.forward(plain(*given))  # type: ignore[method-assign]

    def __exit__(self, *error: Any) -> None:
        super().__exit__()
        del self.model.__dict__["forward"]


def fails(output: torch.Tensor) -> torch.Tensor:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")


class FailsBackward(torch.autograd.Function):
    """Stands for a compiler that fails at the backward pass."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise BackendCompilerFailed(fails, KeyError("mine"), None)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (
            FailsBackward.apply,
            "it fails: BackendCompilerFailed: backend='fails' raised: KeyError: 'mine', at ",
        ),
        (fails, "it fails: OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB, at "),
        (lambda output: 1.1 * output, "its gradients differ by 0."),
        (lambda output: output + 1.0, ""),  # the same gradients of a cross-entropy, and rounding
    ],
    ids=["backward fails", "fails", "wrong", "right"],
)
def test_what_compiles_wrongly_trains_as_before(
    monkeypatch: pytest.MonkeyPatch, forward: Any, reason: str
) -> None:
    """BatchNorm's statistics and dropout's draws are those of the steps, and of nothing else."""
    log: list[str] = []
    monkeypatch.setattr(compile_choice, "StepTimes", lambda device: Times(log, 0.01, 0.007))
    one = Trained(still_network(), torch.optim.AdamW, {"lr": 1e-3})
    other = Trained(still_network(), torch.optim.AdamW, {"lr": 1e-3}, captured=False)
    assert one.captured is not None
    one.captured.choice = CompileChoice(
        lambda: Changed(log, one.model, forward), 2, lambda: 10**6, WORLD, one.said.append
    )
    one.steps(data(100))
    other.steps(data(100))
    assert relative_difference(one.model.state_dict(), other.model.state_dict()) < 1e-4
    said = [line for line in one.said if "compiled no longer" in line]
    if not reason:
        assert not said
        assert log == ["enters"]
        return
    assert log == ["enters", "leaves"]
    assert len(said) == 1
    assert said[0].startswith(f"step: compiled no longer, since {reason}")
    assert len(one.losses) == 100
    assert one.graphs.captures == 1  # what was captured before is still right


def of_new_shape(
    monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> tuple[Trained, Trained, list[str]]:
    """Captured steps of 8 samples, of which from 60 on some have 5, whose backward pass fails where
    the model is compiled; and the same steps by hand."""
    log: list[str] = []
    monkeypatch.setattr(compile_choice, "StepTimes", lambda device: Times(log, 0.01, 0.007))
    one = Trained(still_network(), torch.optim.AdamW, {"lr": 1e-3})
    other = Trained(still_network(), torch.optim.AdamW, {"lr": 1e-3}, captured=False)
    assert one.captured is not None

    def forward(output: torch.Tensor) -> torch.Tensor:
        return FailsBackward.apply(output) if len(output) == 5 else output

    choice = one.captured.choice = CompileChoice(
        lambda: Changed(log, one.model, forward), 2, lambda: 10**6, WORLD, one.said.append
    )
    if resumed:
        choice.begin()
    small = data(40, (5,))
    batches = data(60)[60 * resumed :] + small[:3] + data(4) + small[3:]
    one.steps(batches)
    other.steps(batches)
    return one, other, log


@pytest.mark.parametrize("resumed", [False, True])
def test_a_compiler_that_fails_at_a_new_shape_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    one, other, log = of_new_shape(monkeypatch, resumed)
    assert log == ["enters", "leaves"]
    said = [line for line in one.said if "compiled no longer" in line]
    assert len(said) == 1
    assert said[0].startswith("step: compiled no longer, since it fails: BackendCompilerFailed")
    assert len(one.losses) == len(other.losses)
    assert one.losses == pytest.approx(other.losses, rel=1e-5)
    assert relative_difference(one.model.state_dict(), other.model.state_dict()) < 1e-4


def one_rank_fails() -> tuple[list[bool], list[str]]:
    world = current_world()
    assert world is not None
    said: list[str] = []

    def found(rounded: bool) -> list[torch.Tensor]:
        return alike(rounded) if world.rank == 0 else [fails(torch.ones(1))]

    with CompileChoice(lambda: Marked([]), 10, lambda: 20_000, world, said.append) as choice:
        choice.begin()
        assert choice.shape_fails("a", found)
        assert not choice.active
    with CompileChoice(lambda: Marked([]), 10, lambda: 20_000, world, said.append) as choice:
        choice.begin()
        # Ranks see later shapes at steps of their own, so that they cannot agree on them.
        told = [choice.shape_fails("a", alike), choice.shape_fails("b", found)]
    return told, said


def test_what_was_compiled_before_and_fails_on_one_rank_is_compiled_on_none() -> None:
    one, other = in_world(2, one_rank_fails)
    assert one == other
    assert one[0] == [False, False]
    (line,) = one[1]
    assert line.startswith("step: compiled no longer, since it fails: OutOfMemoryError")


def test_an_error_of_the_compiler_says_what_never_compiles() -> None:
    choice = CompileChoice(lambda: Marked([]), 10, lambda: 20_000, WORLD, [].append)
    error = BackendCompilerFailed(fails, KeyError("a"), None)
    for raised in (error, KeyError("the model's own")):
        with pytest.raises(type(raised)), choice:
            choice.begin()
            raise raised
        assert not choice.active
        notes = [note for note in getattr(raised, "__notes__", []) if "step='auto'" in note]
        assert len(notes) == (raised is error)


def one_rank_differs() -> tuple[list[int], list[str], list[str]]:
    world = current_world()
    assert world is not None
    log: list[str] = []
    said: list[str] = []

    def found(rounded: bool) -> list[torch.Tensor]:
        return [torch.ones(1), torch.full((3,), 1.0 + world.rank * len(log))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_choice, "StepTimes", lambda device: Times(log, 0.01, 0.007))
        with CompileChoice(lambda: Marked(log), 10, lambda: 20_000, world, said.append) as choice:
            changed = [n for n in range(1, STEPS + 1) if choice.step_taken(True, found)]
    return changed, log, said[1:]


def test_what_one_rank_computes_wrongly_no_rank_keeps() -> None:
    one, other = in_world(2, one_rank_differs)
    assert one == other
    changed, log, said = one
    assert changed == []
    assert log == ["enters", "leaves"]
    assert said == [
        "step: compiled no longer, since its gradients differ by 1 of their norm then, and "
        "rounding explains 0.01"
    ]


class OwnTimes(Times):
    """Rank 1 is the slower one, and rank 0 gains nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__([], *((0.001, 0.001) if rank == 0 else (0.010, 0.007)))


def decided(knows: bool) -> tuple[list[int], list[str]]:
    """On each rank: the steps at which the kind changed, and what was said."""
    world = current_world()
    assert world is not None
    said: list[str] = []
    times = OwnTimes(world.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_choice, "StepTimes", lambda device: times)
        choice = CompileChoice(
            lambda: Marked(times.log), 10, lambda: 20_000, world, said.append, able=knows
        )
        with choice:
            changed = [n for n in range(1, STEPS + 1) if choice.step_taken(knows, alike)]
    return changed, said


def test_ranks_decide_alike() -> None:
    found = in_world(2, decided, True)
    assert [changed for changed, _ in found] == [[40], [40]]
    assert found[0] == found[1]
    assert found[0][1][1] == "step: compiled, 7 ms in place of 10"


def test_a_rank_that_cannot_tell_keeps_all_from_it() -> None:
    assert in_world(2, only_rank_0_knows) == [[], []]


def only_rank_0_knows() -> list[int]:
    world = current_world()
    assert world is not None
    changed, _ = decided(world.rank == 0)
    return changed
