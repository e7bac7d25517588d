"""`DistributedOptimizer`: any torch optimizer, whose `step` uses gradients that are reduced over
the ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from allhands.errors import UserError, kind_of
from allhands.horovod import engine
from allhands.horovod.exceptions import CallOrderError
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import Adasum, Average, checked
from allhands.horovod.torch.compression import Compression
from allhands.horovod.torch.reducer import Reducer
from allhands.horovod.torch.reductions import grouped_allreduce_


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class and state, whose `step` first reduces the gradients over the
    ranks.

    They travel in buckets while the backward pass still runs. A parameter without a gradient on
    some rank counts as zero there; without one on any rank it keeps None, as in a single process.
    Sparse gradients stay sparse.

    With `Adasum` each rank makes its own step, and the differences that the steps made are reduced.

    Args:
        optimizer: its state, options and schedulers stay.
        named_parameters: ``model.named_parameters()``: names of at least all parameters of the
            optimizer, for messages and for matching the ranks. None numbers them.
        compression: ``hvd.Compression.none``, ``.fp16`` or ``.bf16``.
        backward_passes_per_step: how many backward passes add up before a step. Their sum is
            reduced, not their mean.
        op: `Average`, `Sum`, `Adasum` or `ActiveAverage`.
        gradient_predivide_factor: gradients are divided by it before they are added up and
            multiplied by it after it, against overflow in fp16. Only with `Average`.
        num_groups: Horovod's old name of a number of `groups`.
        groups: how many groups of gradients to make, or lists of parameters that are reduced as a
            whole each.
        sparse_as_dense: sparse gradients travel as dense ones, and are sparse again.
        process_set: the ranks that train together; on other ranks the optimizer is as it was.

    Raises:
        UserError: an argument cannot be honoured.
    """
    named = _named(optimizer, named_parameters)
    chosen = checked(op)
    if num_groups:
        if groups is not None:
            raise UserError("both num_groups= and groups= are given; leave num_groups= out")
        groups = num_groups
    _check(optimizer, chosen, groups, gradient_predivide_factor, backward_passes_per_step)
    mixin: type = _Reduced
    made: dict[str, Any] = {}
    if chosen is Adasum:
        refused = {"groups": groups is not None, "sparse_as_dense": sparse_as_dense}
        for name, given in refused.items():
            if given:
                raise UserError(
                    f"{name}= has no meaning with op Adasum, which reduces whole steps; leave it "
                    "out"
                )
        engine.current()
        mixin = _Adasum
        made = {"_named": named, "_compression": compression, "_process_set": process_set}
    else:
        reducer = Reducer(
            named,
            compression,
            backward_passes_per_step,
            chosen,
            gradient_predivide_factor,
            groups,
            sparse_as_dense,
            process_set,
        )
        made = {"_reducer": reducer, "_skips": False}
    base = type(optimizer)
    wrapped: Any = object.__new__(type(base.__name__, (mixin, base), {}))
    # A scheduler that was made for it has put a `step` of its own there, bound to the optimizer of
    # before.
    wrapped.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"}, **made
    )
    return wrapped


def _check(
    optimizer: torch.optim.Optimizer,
    op: Any,
    groups: Any,
    gradient_predivide_factor: float,
    backward_passes_per_step: int,
) -> None:
    if isinstance(groups, int) and groups < 1:
        raise UserError(
            f"groups={groups}: set groups to a number of at least 1, to lists of parameters, or to "
            "None"
        )
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise UserError(
            f"gradient_predivide_factor={gradient_predivide_factor} with op {op}; set op to "
            "hvd.Average, or leave the factor out"
        )
    if gradient_predivide_factor <= 0:
        raise UserError(
            f"gradient_predivide_factor={gradient_predivide_factor}: it must be greater than 0"
        )
    if backward_passes_per_step < 1:
        raise UserError(
            f"backward_passes_per_step={backward_passes_per_step}: it must be at least 1"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            "LBFGS chooses its steps by each rank's own loss, so that the ranks would part; use "
            "another optimizer"
        )
    if isinstance(optimizer, _Reduced | _Adasum):
        raise UserError("this optimizer is a DistributedOptimizer already; wrap it once")


def _named(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> list[tuple[str, torch.nn.Parameter]]:
    own = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [(f"parameter {number}", param) for number, param in enumerate(own)]
    given = list(named_parameters)
    for entry in given:
        if (
            not isinstance(entry, tuple)
            or len(entry) != 2
            or not isinstance(entry[1], torch.Tensor)
        ):
            raise UserError(
                f"named_parameters holds {kind_of(entry)}, not (name, parameter); give "
                "model.named_parameters()"
            )
    names = [name for name, _ in given]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
    else:
        twice = []
    if twice:
        raise UserError(
            f"named_parameters has {twice[0]!r} twice; give each parameter its own name"
        )
    name_of = {param: name for name, param in given}
    missing = [number for number, param in enumerate(own) if param not in name_of]
    if missing:
        raise UserError(
            f"named_parameters names {len(own) - len(missing)} of the optimizer's {len(own)} "
            f"parameters, and not number {missing[0]}, of shape {list(own[missing[0]].shape)}; "
            "give the named_parameters() of the whole model, or leave it out"
        )
    return [(name_of[param], param) for param in own]


class _Reduced(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to the class of an optimizer."""

    _reducer: Reducer
    _skips: bool

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, to clip or look at them before `step`, which then
        reduces nothing."""
        self._reducer.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In it, `step` uses gradients that `synchronize` has reduced. `step` notices by itself, so
        that it is not needed."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes add up before a step, from now on."""
        if passes < 1:
            raise UserError(f"set_backward_passes_per_step({passes}): it must be at least 1")
        self._reducer.passes = passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless `synchronize` has, and make the optimizer's step.

        Raises:
            HorovodInternalError: the ranks do not agree, or one of them did not come.
            CallOrderError: in `skip_synchronize`, without `synchronize` before.
        """
        if closure is not None:

            def reduced() -> Any:
                with torch.enable_grad():
                    loss = closure()
                self._reducer.synchronize()
                return loss

            loss: Any = super().step(reduced)
        else:
            if self._skips and not self._reducer.synchronized:
                raise CallOrderError(
                    "step() in skip_synchronize() without synchronize(); call "
                    "optimizer.synchronize() before it"
                )
            if not self._reducer.synchronized:
                self._reducer.synchronize()
            loss = super().step()
        self._reducer.synchronized = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own.

        Raises:
            CallOrderError: gradients are on their way.
        """
        if self._reducer.busy():
            raise CallOrderError(
                "zero_grad() between backward() and step(), while gradients are on their way; call "
                "step() or synchronize() first"
            )
        self._reducer.synchronized = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the gradients of the new parameters are reduced as well."""
        if "_reducer" in self.__dict__:
            if self._reducer.busy():
                raise CallOrderError(
                    "add_param_group() between backward() and step(); call step() first"
                )
            super().add_param_group(param_group)
            number = len(self.param_groups)
            params = self.param_groups[-1]["params"]
            self._reducer.add(
                [
                    (f"group {number}, parameter {place}", param)
                    for place, param in enumerate(params)
                ]
            )


class _Adasum(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds with op Adasum: the ranks' own steps become one."""

    _named: list[tuple[str, torch.nn.Parameter]]
    _compression: Any
    _process_set: ProcessSet

    def synchronize(self) -> None:
        """Nothing: gradients stay each rank's own, so that clipping acts on those."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused: a step cannot be made without the other ranks.

        Raises:
            UserError: always.
        """
        raise UserError(
            "skip_synchronize() has no meaning with op Adasum; call step() outside of it"
        )
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Any number of backward passes may add up before a step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the optimizer's own step, and replace what it changed by the ranks' changes, reduced
        by Adasum."""
        if not self._process_set.included():
            return super().step(closure)
        params = [param for _, param in self._named if param.requires_grad]
        before = [param.detach().clone() for param in params]
        loss = super().step(closure)
        with torch.no_grad():
            changes = [
                (param - old).contiguous() for param, old in zip(params, before, strict=True)
            ]
            narrow = [self._compression.compress(change) for change in changes]
            grouped_allreduce_(
                [value for value, _ in narrow],
                name="adasum.changes",
                op=Adasum,
                process_set=self._process_set,
            )
            for param, old, (value, context) in zip(params, before, narrow, strict=True):
                param.copy_(old + self._compression.decompress(value, context))
        return loss


def _reduce_before_unscaling() -> None:
    """A GradScaler looks for infinite gradients, and skips the step. On each rank's own gradients
    it would skip on some ranks only, and divide gradients that are on their way."""
    scaler: Any = torch.amp.GradScaler
    own = scaler.unscale_
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def unscale_(self: Any, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, _Reduced) and not optimizer._reducer.synchronized:
            optimizer.synchronize()
        own(self, optimizer)

    scaler.unscale_ = unscale_


_reduce_before_unscaling()
