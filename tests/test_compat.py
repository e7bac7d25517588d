"""Private names of PyTorch do in this version what the package expects of them."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allhands import compat
from allhands.compat import default_store, gradient_hooks, in_backward, mark_stepped, step_hooks
from allhands.step.update import backward


def test_private_names_are_what_they_are_taken_for() -> None:
    for name in compat._PRIVATE:
        assert getattr(compat, name) is not None, name
    norms = (nn.BatchNorm1d(1), nn.SyncBatchNorm(1))
    assert all(isinstance(norm, compat.BatchNormBase) for norm in norms)
    assert not isinstance(nn.InstanceNorm1d(1), compat.BatchNormBase)
    assert isinstance(nn.InstanceNorm1d(1), compat.NormBase)
    assert isinstance(nn.Dropout2d(), compat.DropoutBase)
    assert compat.pytree.tree_leaves({"a": [1, (2, 3)]}) == [1, 2, 3]
    with pytest.raises(AttributeError, match="no attribute 'BatchNorm'"):
        _ = compat.BatchNorm


def test_a_backward_pass_is_run_and_frees_its_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = (x * x).sum()
    backward(loss, torch.tensor(0.5))
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="a second time"):
        backward(loss, torch.tensor(0.5))


def test_a_backward_pass_is_seen_from_inside() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(in_backward()))
    y.sum().backward()
    assert seen == [True]
    assert not in_backward()


def test_hooks_are_found() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert step_hooks(optimizer) == []
    assert gradient_hooks(model.weight) == []
    hooks = [lambda *_: None for _ in range(4)]
    optimizer.register_step_pre_hook(hooks[0])
    optimizer.register_step_post_hook(hooks[1])
    model.weight.register_hook(hooks[2])
    model.weight.register_post_accumulate_grad_hook(hooks[3])
    assert step_hooks(optimizer) == hooks[:2]
    assert gradient_hooks(model.weight) == hooks[2:]


def test_a_scheduler_sees_a_marked_step() -> None:
    for marked in (False, True):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if marked:
            mark_stepped(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        assert any("before `optimizer.step()`" in str(one.message) for one in caught) != marked


def test_the_default_store_is_that_of_the_group(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default_store().set("key", "value")
        assert default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_libraries_are_not_taken_apart_at_the_end() -> None:
    library = torch.library.Library("allhands_of_a_test", "DEF")
    other = weakref.finalize(library, print)
    before = [one for one in weakref.finalize._registry if one.atexit]
    try:
        compat.keep_libraries()
        kept = [one for one in before if not one.atexit]
    finally:
        for one in before:
            one.atexit = True
        other.detach()
    owners = [one.peek()[0] for one in kept]
    assert library in owners
    assert other not in kept
    assert all(isinstance(owner, torch.library.Library) for owner in owners)
