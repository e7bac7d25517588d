"""`DistributedOptimizer` computes what one process computes, with every option; what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import allhands.horovod.torch as hvd
from tests.horovod.torch.optimizer_training import (
    Batch,
    batches,
    loss_of,
    model,
    optimizers,
    weights,
)
from tests.refusals import refused
from tests.worlds import in_world

pytestmark = pytest.mark.serial


def passes(net: nn.Module, optimizer: Any) -> None:
    """Three steps of two backward passes each, on this rank's own batches."""
    data = batches(hvd.rank())[:3]
    for batch in data:
        optimizer.zero_grad()
        for _ in range(2):
            loss_of(net, batch).backward()
        optimizer.step()


def clipped(net: nn.Module, optimizer: Any) -> None:
    for batch in batches(hvd.rank())[:3]:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()


def with_closure(net: nn.Module, optimizer: Any) -> None:
    for batch in batches(hvd.rank())[:3]:

        def closure(batch: Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


def plain(net: nn.Module, optimizer: Any) -> None:
    for batch in batches(hvd.rank())[:3]:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()


def scheduled(net: nn.Module, optimizer: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for batch in batches(hvd.rank())[:3]:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
        scheduler.step()


VARIANTS: dict[str, tuple[Callable[[nn.Module, Any], None], dict[str, Any]]] = {
    "plain": (plain, {}),
    "two passes": (passes, {"backward_passes_per_step": 2}),
    "clipped": (clipped, {}),
    "closure": (with_closure, {}),
    "scheduled": (scheduled, {}),
    "predivided": (plain, {"gradient_predivide_factor": 4.0}),
    "two groups": (plain, {"groups": 2}),
    "no names": (plain, {"named_parameters": None}),
    "fp16": (plain, {"compression": hvd.Compression.fp16}),
}


def variants() -> dict[str, Any]:
    hvd.init()
    found: dict[str, Any] = {}
    for name, (loop, options) in VARIANTS.items():
        net = model()
        given = {"named_parameters": net.named_parameters(), **options}
        loop(net, hvd.DistributedOptimizer(optimizers("sgd", net), **given))
        found[name] = weights(net)
    net = model()
    groups = [[net[0].weight, net[4].bias], [net[2].weight]]
    plain(
        net, hvd.DistributedOptimizer(optimizers("sgd", net), net.named_parameters(), groups=groups)
    )
    found["own groups"] = weights(net)
    found["state"] = kept_state()
    found["unused"] = unused()
    found["sparse"] = [sparse(as_dense) for as_dense in (False, True)]
    found["apart"] = [apart(op) for op in (hvd.Average, hvd.Adasum)]
    found["sampler"] = synced_sampler()
    found["scaler"] = skipped_step()
    found["adasum"] = adasum()
    found["refused"] = refusals()
    found["norm"] = sync_batch_norm()
    hvd.shutdown()
    return found


def reference(name: str) -> list[torch.Tensor]:
    net = model()
    optimizer = optimizers("sgd", net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(2 if name == "two passes" else 1):
            for rank in range(2):
                (loss_of(net, batches(rank)[step]) / 2).backward()
        if name == "clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        if name == "scheduled":
            scheduler.step()
    return weights(net)


def kept_state() -> tuple[list[torch.Tensor], bool]:
    """Momentum from before it was wrapped stays, and a broadcast of an empty state makes no
    step."""
    net = model()
    optimizer = optimizers("adamw", net)
    before = weights(net)
    hvd.broadcast_optimizer_state(optimizer, 0)
    untouched = all(map(torch.equal, weights(net), before)) and not optimizer.state
    loss_of(net, batches(0)[0]).backward()
    optimizer.step()
    if hvd.rank() == 1:
        optimizer.param_groups[0]["lr"] = 5.0
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    hvd.broadcast_optimizer_state(optimizer, 0)
    plain(net, hvd.DistributedOptimizer(optimizer, net.named_parameters()))
    return weights(net), untouched


def kept_state_by_hand() -> list[torch.Tensor]:
    net = model()
    optimizer = optimizers("adamw", net)
    loss_of(net, batches(0)[0]).backward()
    optimizer.step()
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(net, batches(rank)[step]) / 2).backward()
        optimizer.step()
    return weights(net)


def unused() -> tuple[Any, Any, float]:
    """One parameter that no rank uses, and one that rank 0 alone does."""
    nobody, one = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW([nobody, one], lr=0.1, weight_decay=0.5))
    if hvd.rank() == 0:
        one.sum().backward()
    optimizer.step()
    return nobody.grad, one.grad, float(nobody.detach().sum())


def sparse(as_dense: bool) -> tuple[bool, torch.Tensor]:
    table = nn.Embedding(5, 2, sparse=True)
    nn.init.ones_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense
    )
    table(torch.tensor([hvd.rank(), 4])).sum().backward()
    optimizer.step()
    assert table.weight.grad is not None
    return table.weight.grad.is_sparse, table.weight.detach()[:, 0].clone()


def apart(op: Any) -> float:
    """The weight after a step of a process set that has rank 0 alone."""
    first = hvd.add_process_set([0])
    weight = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), op=op, process_set=first
    )
    (weight * (hvd.rank() + 1)).backward()
    optimizer.step()
    hvd.remove_process_set(first)
    return float(weight)


def synced_sampler() -> list[list[int]]:
    """What a sampler deals at first, and after two batches of it."""
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    state.sync()
    dealt = [list(sampler)]
    for number in range(2):
        sampler.record_batch(number, 1)
    state.commit()
    state.sync()
    return [*dealt, list(sampler)]


def skipped_step() -> tuple[list[float], float, float]:
    """One rank's gradient is infinite, so that a scaler skips the step: on both."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if (step, hvd.rank()) == (1, 1) else 1.0 + hvd.rank()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(weight.item())
    return seen, scaler.get_scale(), float(optimizer.param_groups[0]["lr"])


def adasum() -> torch.Tensor:
    """Each rank moves along its own axis by its learning rate: orthogonal changes add up."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.Adasum)
    weight[hvd.rank()].backward()
    optimizer.step()
    return weight.detach()


def refusals() -> dict[str, str]:
    net, found = model(), {}

    def make(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)

    found["twice"] = refused(
        lambda: make(named_parameters=[("w", param) for param in net.parameters()])
    )
    found["missing"] = refused(lambda: make(named_parameters=list(net.named_parameters())[1:]))
    found["no pairs"] = refused(lambda: make(named_parameters=list(net.parameters())))
    found["predivide"] = refused(lambda: make(op=hvd.Sum, gradient_predivide_factor=2.0))
    found["op"] = refused(lambda: make(op="Median"))
    found["passes"] = refused(lambda: make(backward_passes_per_step=0))
    found["groups"] = refused(lambda: make(groups=0))
    found["lbfgs"] = refused(lambda: hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters())))
    found["wrapped"] = refused(lambda: hvd.DistributedOptimizer(make()))
    found["params"] = refused(lambda: hvd.broadcast_parameters(3))
    net = model()
    optimizer = make(named_parameters=net.named_parameters())
    batch = batches(hvd.rank())[0]
    loss_of(net, batch).backward()
    with pytest.raises(AssertionError):  # as in Horovod
        optimizer.zero_grad()
    found["zero_grad"] = refused(optimizer.zero_grad)
    found["again"] = refused(lambda: loss_of(net, batch).backward())
    with optimizer.skip_synchronize():
        found["skip"] = refused(optimizer.step)
    optimizer.step()
    return found


def sync_batch_norm() -> dict[str, torch.Tensor]:
    rank = hvd.rank()
    layer = hvd.SyncBatchNorm(4)
    cut = 3 if rank == 0 else 8
    x = torch.randn(11, 4, 2, generator=torch.Generator().manual_seed(1))
    own = (x[:cut] if rank == 0 else x[11 - cut :]).clone().requires_grad_()
    (layer(own) ** 3).sum().backward()
    assert own.grad is not None
    parts = {
        "input": hvd.allgather(own.grad),
        "mean": layer.running_mean,
        "variance": layer.running_var,
    }
    return {
        **parts,
        "weight": hvd.allreduce(layer.weight.grad, op=hvd.Sum),
        "bias": hvd.allreduce(layer.bias.grad, op=hvd.Sum),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return in_world(2, variants)


@pytest.mark.parametrize("name", [*VARIANTS, "own groups"])
def test_every_option_trains_as_one_process_does(name: str, two: list[dict[str, Any]]) -> None:
    wanted = reference(name)
    tolerance = 2e-3 if name == "fp16" else 1e-6
    for found in two:
        for own, other in zip(found[name], wanted, strict=True):
            torch.testing.assert_close(own, other, atol=tolerance, rtol=0)
    assert all(map(torch.equal, two[0][name], two[1][name]))


def test_the_optimizers_state_stays_and_a_broadcast_makes_no_step(
    two: list[dict[str, Any]],
) -> None:
    for found, untouched in (rank["state"] for rank in two):
        assert untouched
        for own, other in zip(found, kept_state_by_hand(), strict=True):
            torch.testing.assert_close(own, other, atol=1e-6, rtol=0)


def test_a_parameter_that_no_rank_uses_keeps_none_and_its_value(two: list[dict[str, Any]]) -> None:
    for nobody, one, value in (rank["unused"] for rank in two):
        assert nobody is None
        assert one.tolist() == [0.5, 0.5]
        assert value == 2.0


def test_sparse_gradients_are_averaged(two: list[dict[str, Any]]) -> None:
    for found in (rank["sparse"] for rank in two):
        assert [is_sparse for is_sparse, _ in found] == [True, True]
        assert [values.tolist() for _, values in found] == [[0.5, 0.5, 1.0, 1.0, 0.0]] * 2


def test_a_rank_outside_of_the_process_set_trains_alone(two: list[dict[str, Any]]) -> None:
    assert [found["apart"] for found in two] == [[0.0, 0.0], [-1.0, -1.0]]


def test_a_sampler_deals_what_is_left_on_every_rank(two: list[dict[str, Any]]) -> None:
    assert [found["sampler"] for found in two] == [[[0, 2, 4, 6], [4, 6]], [[1, 3, 5, 7], [5, 7]]]


def test_a_scaler_skips_the_step_on_all_ranks(two: list[dict[str, Any]]) -> None:
    for seen, scale, _ in (rank["scaler"] for rank in two):
        assert seen == [-0.5, -0.5, -2.0]
        assert scale == 2.0


def test_adasum_reduces_the_ranks_own_steps(two: list[dict[str, Any]]) -> None:
    assert [rank["adasum"].tolist() for rank in two] == [[-0.5, -0.5]] * 2


def test_batch_norm_over_all_ranks_is_that_of_one_process(two: list[dict[str, Any]]) -> None:
    layer = nn.BatchNorm1d(4)
    x = torch.randn(11, 4, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (layer(x) ** 3).sum().backward()
    wanted = {
        "input": x.grad,
        "mean": layer.running_mean,
        "variance": layer.running_var,
        "weight": layer.weight.grad,
        "bias": layer.bias.grad,
    }
    for found in (rank["norm"] for rank in two):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-5)


def test_what_cannot_be_honoured_is_refused_by_name(two: list[dict[str, Any]]) -> None:
    wanted = {
        "twice": "'w' twice; give each parameter its own name",
        "missing": "names 5 of the optimizer's 6 parameters, and not number 0, of shape [16, 6]",
        "no pairs": "give model.named_parameters()",
        "predivide": "set op to hvd.Average, or leave the factor out",
        "op": "op='Median' is no reduction; set op to one of hvd.Average",
        "passes": "backward_passes_per_step=0: it must be at least 1",
        "groups": "groups=0: set groups to a number of at least 1",
        "lbfgs": "LBFGS chooses its steps by each rank's own loss",
        "wrapped": "is a DistributedOptimizer already",
        "params": "give model.state_dict() or model.named_parameters()",
        "zero_grad": "call step() or synchronize() first",
        "again": "more than 1 times (backward_passes_per_step)",
        "skip": "call optimizer.synchronize() before it",
    }
    for found in (rank["refused"] for rank in two):
        for name, text in wanted.items():
            assert text in found[name], name
