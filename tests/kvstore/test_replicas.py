from __future__ import annotations

import pytest
import torch
from torch import nn

import allhands
from allhands.errors import UserError
from allhands.kvstore import Trainer, replicate, split_and_load
from allhands.kvstore.replicas import Replicas


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def two_on_one_device() -> Replicas:
    """Two replicas that a machine without GPUs can hold; the second is found under a device that is
    not its own."""
    first, second = net(), net()
    return Replicas({torch.device("cpu"): first, torch.device("meta"): second})


def test_one_device_has_the_net_itself() -> None:
    own = net()
    replicas = replicate(own, "cpu")
    assert replicas.replicas == [own]
    assert [name for name, _ in replicas.named_parameters()] == [
        name for name, _ in own.named_parameters()
    ]
    assert all(a is b for a, b in zip(replicas.parameters(), own.parameters(), strict=True))
    assert replicas.state_dict().keys() == own.state_dict().keys()
    assert replicate(net(), ["cpu", "cpu"]).devices == [torch.device("cpu")]


def test_a_call_goes_to_the_replica_of_its_device() -> None:
    replicas = replicate(net(), ["cpu", "meta"])
    x, on_meta = split_and_load(torch.randn(8, 4), replicas.devices)
    assert replicas(x).device.type == "cpu"
    assert replicas(on_meta).device.type == "meta"
    with pytest.raises(
        UserError, match="no tensor was passed, and there are replicas on cpu, meta"
    ):
        replicas(3)
    with pytest.raises(
        UserError,
        match="the first tensor passed is on meta, and there are replicas on cpu; cut the batch",
    ):
        replicate(net(), "cpu")(on_meta)


def test_the_tutorials_loop_on_one_device_named_twice() -> None:
    ctx = ["cpu", "cpu"]
    torch.manual_seed(1)
    X, Y = torch.randn(6, 4), torch.randint(3, (6,))
    loss = nn.CrossEntropyLoss(reduction="sum")
    reference = nn.Linear(4, 3)
    copied = nn.Linear(4, 3)
    copied.load_state_dict(reference.state_dict())

    model = replicate(copied, ctx)
    trainer = Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1})
    data, label = split_and_load(X, ctx), split_and_load(Y, ctx)
    for each in [loss(model(x), y) for x, y in zip(data, label, strict=True)]:
        each.backward()
    trainer.step(6)

    nn.CrossEntropyLoss()(reference(X), Y).backward()
    for ours, theirs in zip(copied.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - 0.1 * theirs.grad, rtol=0, atol=1e-6)


def test_evaluation_and_state_dict_have_the_mean_of_the_running_statistics() -> None:
    replicas = two_on_one_device()
    first, second = replicas.replicas
    for _ in range(2):
        first(torch.randn(5, 4))
        second(torch.randn(5, 4) + 2)
    means = (first[1].running_mean + second[1].running_mean) / 2
    assert not torch.equal(first[1].running_mean, second[1].running_mean)
    state = replicas.state_dict()
    assert torch.equal(state["1.running_mean"], means)
    assert state["1.num_batches_tracked"] == 2
    assert not torch.equal(first[1].running_mean, means)  # to look at a training does not change it
    replicas.eval()
    assert torch.equal(first[1].running_mean, means)
    assert torch.equal(second[1].running_mean, means)
    assert not any(replica.training or replica[1].training for replica in replicas.replicas)


def test_loading_reaches_all_replicas() -> None:
    replicas, other = two_on_one_device(), net()
    with torch.no_grad():
        other[0].weight.fill_(3)
    replicas.load_state_dict(other.state_dict())
    assert all(bool((replica[0].weight == 3).all()) for replica in replicas.replicas)
    replicas.requires_grad_(False)
    assert not any(p.requires_grad for replica in replicas.replicas for p in replica.parameters())


def test_what_replicas_refuse() -> None:
    replicas = replicate(net(), "cpu")
    with pytest.raises(UserError, match="replicated already"):
        replicate(replicas, "cpu")
    with pytest.raises(UserError, match="cannot be moved or cast"):
        replicas.half()
    with pytest.raises(UserError, match="before replicate"):
        replicas.apply(lambda module: None)
    with pytest.raises(UserError, match="leave assign out"):
        replicas.load_state_dict(net().state_dict(), assign=True)
    with pytest.raises(UserError, match="'weight' has no shape yet"):
        replicate(nn.LazyLinear(3), "cpu")


@pytest.mark.gpu(2)
def test_two_gpus_train_as_one(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(allhands.finalize)  # create("dist") makes a world of one
    ctx = ["cuda:0", "cuda:1"]
    torch.manual_seed(1)
    X, Y = torch.randn(24, 4), torch.randint(3, (24,))

    def trained(
        devices: list[str], kvstore: str | None, on_store: bool | None
    ) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = replicate(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), devices)
        trainer = Trainer(
            model.collect_params(),
            "adam",
            {"learning_rate": 0.01},
            kvstore=kvstore,
            update_on_kvstore=on_store,
        )
        loss = nn.CrossEntropyLoss(reduction="sum")
        for step in range(10):
            size = 24 if step % 2 else 21
            data = split_and_load(X[:size], devices, even_split=False)
            label = split_and_load(Y[:size], devices, even_split=False)
            for each in [loss(model(x), y) for x, y in zip(data, label, strict=True)]:
                each.backward()
            trainer.step(size)
        for replica in model.replicas[1:]:
            for ours, first in zip(replica.parameters(), model.parameters(), strict=True):
                assert torch.equal(ours.cpu(), first.cpu())
        return {name: value.cpu() for name, value in model.state_dict().items()}

    alone = trained(["cpu"], None, None)
    for kvstore, on_store in (("device", False), ("device", True), ("local", True), ("dist", True)):
        together = trained(ctx, kvstore, on_store)
        for name in alone:
            torch.testing.assert_close(together[name], alone[name], rtol=0, atol=1e-5)
