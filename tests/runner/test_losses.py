"""Losses that say what they average over, under every strategy, against a plain loop over the
global batches."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import (
    DDP,
    KVStore,
    LocalSGD,
    ModelLoss,
    OverBatch,
    PerTarget,
    Pipeline,
    SupervisedRunner,
    Tensor,
    UserError,
)
from tests.reference import relative_difference, train_by_hand
from tests.worlds import in_world

GLOBAL, EPOCHS = 8, 2
Cell = dict[str, Any]

STRATEGIES: dict[str, Callable[[], Cell]] = {
    "accumulate=2": lambda: {"accumulate": 2},
    "ddp": lambda: {"distributed": "ddp"},
    "ddp, accumulate=2": lambda: {"distributed": "ddp", "accumulate": 2},
    "ddp, sharded state": lambda: {"distributed": DDP(optimizer_state="sharded")},
    "kvstore": lambda: {"distributed": "kvstore"},
    "kvstore, worker": lambda: {"distributed": KVStore(update="worker"), "accumulate": 2},
    "local_sgd": lambda: {"distributed": LocalSGD(every=1)},
    "fsdp": lambda: {"distributed": "fsdp"},
    "fsdp, accumulate=2": lambda: {"distributed": "fsdp", "accumulate": 2},
    "tensor": lambda: {"distributed": Tensor(plan={"1": "colwise", "3": "rowwise"})},
    "pipeline": lambda: {"distributed": Pipeline(microbatches=2)},
}
WHOLE = ("accumulate=2", "tensor", "pipeline")  # every worker sees all samples


def tokens() -> TensorDataset:
    """17 sequences, of whose six tokens the first ones count. With eight in a batch, the last step
    has one sequence."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 7, (2, 17, 6), generator=generator)
    for row in range(17):
        y[row, 1 + row * 5 % 6 :] = -100
    return TensorDataset(x, y)


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7))


def token_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def token_pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), (
        target != -100
    ).sum()


class WithLoss(nn.Module):
    """Computes its own loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = language_model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.inner(x)
        return {"loss": token_mean(logits[:, :-1], labels[:, 1:]), "logits": logits}


class Labels(SupervisedRunner):
    def handle_batch(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(*batch), batch[1]


def trained(
    criterion: Any, runner: type[SupervisedRunner], make: Callable[[], nn.Module], names: list[str]
) -> Any:
    """The weights and the reported losses by strategy, in this process's world."""
    found = {}
    for name in names:
        cell = STRATEGIES[name]()
        model = make()
        size = GLOBAL // cell.get("accumulate", 1) // (1 if name in WHOLE else 2)
        history = runner(device="cpu").train(
            model=model,
            criterion=criterion,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            num_epochs=EPOCHS,
            loaders={
                "train": DataLoader(tokens(), batch_size=size),
                "valid": DataLoader(tokens(), batch_size=3),
            },
            **cell,
        )
        found[name] = model.state_dict(), history["train"]["loss"], history["valid"]["loss"]
    return found


def check(
    found: Any,
    by_hand: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    make: Callable[[], nn.Module],
    counted: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model, (x, y), losses = make(), tokens().tensors, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = torch.arange(len(x)).split(GLOBAL)
    for _ in range(EPOCHS):
        for rows in batches:
            optimizer.zero_grad()
            loss = by_hand(model, x[rows], y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    weights = torch.stack([counted(y[rows]).sum() for rows in batches]).double()
    reported = float(
        (torch.tensor(losses[-len(batches) :]).double() * weights).sum() / weights.sum()
    )
    with torch.no_grad():
        valid = float(by_hand(model, x, y))
    for name, (state, train, validated) in found.items():
        assert relative_difference(state, model.state_dict()) < 1e-5, name
        assert train[-1] == pytest.approx(reported, rel=1e-5), name
        assert validated[-1] == pytest.approx(valid, rel=1e-5), name


@pytest.mark.serial
@pytest.mark.parametrize(
    "criterion", [token_pair, PerTarget(token_mean)], ids=["pair", "PerTarget"]
)
def test_a_loss_over_targets_is_exact_under_every_strategy(criterion: Any) -> None:
    alone = trained(criterion, SupervisedRunner, language_model, ["accumulate=2"])
    several = in_world(2, trained, criterion, SupervisedRunner, language_model, [*STRATEGIES][1:])
    for found in (alone, several[0]):
        check(
            found, lambda model, x, y: token_mean(model(x), y), language_model, lambda y: y != -100
        )


@pytest.mark.serial
def test_a_models_own_loss_is_exact() -> None:
    criterion, names = (
        ModelLoss(shift=True),
        [name for name in [*STRATEGIES][1:] if name not in WHOLE],
    )
    alone = trained(criterion, Labels, WithLoss, ["accumulate=2"])
    several = in_world(2, trained, criterion, Labels, WithLoss, names)
    for found in (alone, several[0]):
        check(found, lambda model, x, y: model(x, y)["loss"], WithLoss, lambda y: y[:, 1:] != -100)


def first_rank_alone() -> torch.Tensor:
    """The weights after one step on one sequence, of which rank 1 has none and so has not seen the
    criterion."""
    model = language_model()
    SupervisedRunner().train(
        model=model,
        criterion=token_pair,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        distributed="ddp",
        datasets={"batch_size": 4, "train": TensorDataset(*(t[:1] for t in tokens().tensors))},
    )
    return model[1].weight.detach()


@pytest.mark.serial
def test_a_rank_without_a_sample_learns_that_the_criterion_gives_pairs() -> None:
    model, (x, y) = language_model(), tokens().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train_by_hand(model, token_mean, optimizer, (x, y), iter([torch.arange(1)]), 1)
    for weight in in_world(2, first_rank_alone):
        torch.testing.assert_close(weight, model[1].weight.detach())


def test_a_batch_without_a_target_that_counts_has_no_gradient() -> None:
    model, (x, y) = language_model(), tokens().tensors
    criterion = PerTarget(lambda o, t: o.flatten(0, 1)[t.flatten() != -100].square().mean())
    loss, count = criterion(model(x), torch.full_like(y, -100))
    loss.backward()
    assert (float(loss), float(count)) == (0.0, 0.0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_criteria_that_count_can_be_pickled() -> None:
    criterion = pickle.loads(pickle.dumps(PerTarget(token_mean, ignore_index=3)))
    assert (criterion.fn, criterion.ignore_index) == (token_mean, 3)
    assert pickle.loads(pickle.dumps(ModelLoss(shift=True))).shift


def test_a_target_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(UserError, match=r"PerTarget counts.*the target is None.*batch\['labels'\]"):
        PerTarget(token_mean)(torch.rand(2, 3), None)
    with pytest.raises(UserError, match=r"ModelLoss.*without a tensor output.loss"):
        ModelLoss()({"logits": 0}, torch.ones(2))
    with pytest.raises(UserError, match="'targets' or 'samples'"):
        ModelLoss(over="tokens")


def test_a_pair_must_be_a_sum_and_a_number() -> None:
    model = language_model()
    with pytest.raises(UserError, match=r"\(sum, count\): the sum of the losses"):
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=lambda o, t: (o, 3),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            loaders={"train": DataLoader(tokens(), batch_size=4)},
        )


def batch_rmse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten()).sqrt()


def refusals(
    names: list[str], criterion: Any, runner: Any = SupervisedRunner, make: Any = language_model
) -> dict[str, str]:
    """What each strategy says to a criterion, and that no weight was changed."""
    said = {}
    for name in names:
        cell, model = STRATEGIES[name](), make()
        try:
            runner(device="cpu").train(
                model=model,
                criterion=criterion,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
                loaders={"train": DataLoader(tokens(), batch_size=4)},
                **cell,
            )
            said[name] = ""
        except UserError as error:
            said[name] = str(error)
            assert all(
                torch.equal(a, b)
                for a, b in zip(model.parameters(), make().parameters(), strict=True)
            ), name
    return said


@pytest.mark.serial
def test_what_is_no_mean_is_refused_where_a_batch_is_divided() -> None:
    several = [name for name in STRATEGIES if name not in ("accumulate=2", "tensor")]
    said = [*in_world(2, refusals, several, token_mean), refusals(["accumulate=2"], token_mean)]
    for strategies in said:
        for name, text in strategies.items():
            assert "token_mean is no mean over the samples" in text, name
    own = in_world(2, refusals, ["ddp", "fsdp"], lambda o, t: o["loss"], Labels, WithLoss)
    assert all("allhands.ModelLoss()" in text for strategies in own for text in strategies.values())
    # All its workers see the whole batch.
    assert in_world(2, refusals, ["tensor"], token_mean) == [{"tensor": ""}] * 2


def test_one_process_takes_any_criterion_and_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, by_hand, (x, y) = language_model(), language_model(), tokens().tensors
    SupervisedRunner(device="cpu").train(
        model=model,
        criterion=batch_rmse,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        num_epochs=2,
        loaders={"train": DataLoader(tokens(), batch_size=8)},
    )
    rows = iter(torch.arange(17).split(8) * 2)
    train_by_hand(
        by_hand, batch_rmse, torch.optim.SGD(by_hand.parameters(), lr=0.5), (x, y), rows, 6
    )
    assert relative_difference(model.state_dict(), by_hand.state_dict()) < 1e-6
    assert capsys.readouterr().out.count("note: with accumulate or several workers") == 1


def evaluated(criterion: Any) -> str:
    try:
        SupervisedRunner(device="cpu").evaluate(
            model=language_model(),
            criterion=criterion,
            loaders={"valid": DataLoader(tokens(), batch_size=4)},
            distributed="ddp",
        )
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.serial
def test_evaluate_refuses_it_too() -> None:
    assert all("token_mean is no mean" in text for text in in_world(2, evaluated, token_mean))


def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each sample among all others of the batch; those that begin with the same token are none of
    them."""
    features, first = output.flatten(1), target[:, 0]
    same = (first[:, None] == first[None]) & ~torch.eye(len(first), dtype=torch.bool)
    return F.cross_entropy(
        (features @ features.T).masked_fill(same, -9.0), torch.arange(len(first))
    )


def check_over_batch(found: Any, workers: int) -> None:
    model, (x, y), losses = language_model(), tokens().tensors, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows in torch.arange(17).split(GLOBAL) * EPOCHS:
        optimizer.zero_grad()
        loss = contrast(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item() * len(rows) / 17)
    for name, (state, train, valid) in found.items():
        with torch.no_grad():
            parts = torch.arange(17).split(3 * (1 if name in WHOLE else workers))
            validated = sum(
                float(contrast(model(x[rows]), y[rows])) * len(rows) / 17 for rows in parts
            )
        assert relative_difference(state, model.state_dict()) < 1e-5, name
        assert train[-1] == pytest.approx(sum(losses[3:]), abs=1e-6), name  # of sums near 1
        assert valid[-1] == pytest.approx(validated, abs=1e-6), name


@pytest.mark.serial
def test_a_loss_over_the_whole_batch_is_exact_under_every_strategy() -> None:
    criterion, names = (
        OverBatch(contrast),
        [name for name in [*STRATEGIES][1:] if name != "pipeline"],
    )
    check_over_batch(trained(criterion, SupervisedRunner, language_model, ["accumulate=2"]), 1)
    for found in in_world(2, trained, criterion, SupervisedRunner, language_model, names):
        check_over_batch(found, 2)


@pytest.mark.parametrize(
    ("strategy", "instead"),
    [
        (Pipeline(), "distributed='fsdp'"),
        (LocalSGD(every=4), r"LocalSGD\(every=1\)"),
        (KVStore(mode="async", servers=1), r"KVStore\(\)"),
    ],
)
def test_a_strategy_that_cannot_put_a_batch_together_refuses_it(
    strategy: Any, instead: str
) -> None:
    model = language_model()
    with pytest.raises(UserError, match=f"OverBatch.*{instead}"):
        SupervisedRunner(device="cpu").train(
            model=model,
            criterion=OverBatch(contrast),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            loaders={"train": DataLoader(tokens(), batch_size=4)},
            distributed=strategy,
            workers=2,
        )


def test_outputs_without_samples_first_cannot_be_put_together() -> None:
    model = WithLoss()
    with pytest.raises(UserError, match=r"OverBatch.*got shapes \[\], \[8, 6, 7\], \[8, 6\]"):
        Labels(device="cpu").train(
            model=model,
            criterion=OverBatch(lambda o, t: o["loss"]),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            loaders={"train": DataLoader(tokens(), batch_size=8)},
        )
