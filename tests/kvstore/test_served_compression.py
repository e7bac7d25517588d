"""Compression through servers: what arrives, what is left over, and that training still
converges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from allhands.comm.codecs import codec_from
from allhands.kvstore import Share, Trainer
from tests.kvstore.serving import error_of, job, same, weights_of


class MxnetTwoBit:
    """MXNet's rule, by hand: what is left over and the gradient together send +threshold,
    -threshold or nothing."""

    def __init__(self, count: int, threshold: float) -> None:
        self.left = np.zeros(count, np.float32)
        self.threshold = np.float32(threshold)

    def sent(self, grad: np.ndarray) -> np.ndarray:
        self.left = self.left + grad
        found = np.where(self.left >= self.threshold, self.threshold, 0) + np.where(
            self.left <= -self.threshold, -self.threshold, 0
        )
        self.left = (self.left - found).astype(np.float32)
        return found.astype(np.float32)


def gradients(rank: int, steps: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(rank)
    return [rng.normal(0, 0.4, count).astype(np.float32) for _ in range(steps)]


def test_2bit_pushes_are_those_of_a_numpy_model() -> None:
    count, steps = 37, 12
    models = [MxnetTwoBit(count, 0.5) for _ in range(3)]
    expected = []
    for step in range(steps):
        sent = [one.sent(gradients(rank, steps, count)[step]) for rank, one in enumerate(models)]
        expected.append(sent[0] + sent[1] + sent[2])

    def work(rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        store = made.store(rank)
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.init("w", torch.zeros(count))
        found = []
        for grad in gradients(rank, steps, count):
            store.push("w", torch.from_numpy(grad))
            found.append(store.pull("w"))
        return found, store.residuals()["w"]

    with job(3, servers=2) as made:
        worlds = made.run(work)
    for (found, left), one in zip(worlds, models, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert np.array_equal(ours.numpy(), theirs)
        assert np.array_equal(left.numpy(), one.left)


@pytest.mark.parametrize("kind", ["fp16", "bf16", "2bit", "1bit", "topk"])
def test_all_that_was_given_arrives_but_for_what_is_left(kind: str) -> None:
    """The sum over the steps of what arrives is the sum of the gradients minus the residuals, on
    both ways."""
    count, steps = 50, 15

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        store = made.store(rank)
        store.set_gradient_compression(
            {"type": kind, "pull": "none", **({"keep": 0.2} if kind == "topk" else {})}
        )
        store.init("w", torch.zeros(count))
        arrived, given = (
            torch.zeros(count, dtype=torch.float64),
            torch.zeros(count, dtype=torch.float64),
        )
        for grad in gradients(rank, steps, count):
            value = torch.from_numpy(grad)
            given += value
            store.pushpull("w", value)
            arrived += value
        return arrived, given, store.residuals()["w"].double()

    with job(2) as made:
        worlds = made.run(work)
    given = sum(one[1] for one in worlds) - sum(one[2] for one in worlds)
    for arrived, _, _ in worlds:
        assert float((arrived - given).abs().max()) <= 2e-5  # float32 sums of 30 numbers
    assert float(sum(one[2].abs().max() for one in worlds)) > 0


def test_values_come_down_compressed_and_lose_nothing_for_good() -> None:
    """What the workers have follows the servers' weights: the difference does not grow, and goes
    when the weights stand still."""
    for kind, most in (("fp16", 1e-3), ("bf16", 1e-2), ("1bit", 0.4), ("topk", 0.4)):
        with job(2, servers=2) as made:

            def work(
                rank: int, made: Any = made, kind: str = kind
            ) -> tuple[torch.Tensor, torch.Tensor]:
                store = made.store(rank)
                pull = {"type": kind, **({"keep": 0.2} if kind == "topk" else {})}
                store.set_gradient_compression({"type": "none", "pull": pull})
                store.set_optimizer("sgd", lr=0.1)
                store.init("w", torch.linspace(-1, 1, 64))
                for grad in gradients(0, 10, 64):
                    store.push("w", torch.from_numpy(grad), weight=1)
                    moving = store.pull("w")
                for _ in range(60):
                    store.push("w", torch.zeros(64), weight=1)
                    out = store.pull("w")
                return moving, out

            worlds = made.run(work)
            (weights,) = [
                chunk.weights.clone()
                for server in made.servers
                for chunk in server.shards[0].chunks()
            ]
        assert torch.equal(worlds[0][0], worlds[1][0])
        exact = torch.linspace(-1, 1, 64) - 0.1 * sum(
            torch.from_numpy(one) for one in gradients(0, 10, 64)
        )
        assert float((weights - exact).abs().max()) <= 1e-6
        for moving, out in worlds:
            assert float((moving - exact).abs().max()) <= most, kind
            assert float((out - exact).abs().max()) <= (1e-6 if kind != "1bit" else 1e-2), kind


def converged(kind: str, mode: str, options: dict[str, Any], **rules: Any) -> float:
    """How far two workers' training of a linear model ends from its target."""
    generator = torch.Generator().manual_seed(1)
    target, X = torch.randn(6, generator=generator), torch.randn(32, 6, generator=generator)
    nets = [nn.Linear(6, 1, bias=False) for _ in range(2)]

    def work(rank: int) -> None:
        store = made.store(rank, mode, **rules)
        trainer = Trainer(
            nets[rank],
            "sgd",
            {"lr": 0.05},
            kvstore=store,
            compression_params={"type": kind, **options},
        )
        for step in range(200):
            part = X[(step * 4 + rank * 16) % 32 :][:4]
            (nets[rank](part)[:, 0] - part @ target).square().mul(0.5).sum().backward()
            trainer.step(len(part))
        if mode == "dist":
            store.barrier()

    with job(2, servers=2) as made:
        made.run(work)
    if mode == "dist":
        assert same(weights_of(nets[0]), weights_of(nets[1]))
    return max(float((net.weight.detach()[0] - target).abs().max()) for net in nets)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fp16", {}),
        ("bf16", {}),
        ("1bit", {}),
        ("topk", {"keep": 0.34}),
        ("2bit", {"threshold": 1.0}),
    ],
)
def test_training_converges_with_both_ways_compressed(kind: str, options: dict[str, Any]) -> None:
    assert converged(kind, "dist", options) < 0.06
    assert converged(kind, "dist_async", options) < 0.06
    if kind == "bf16":
        assert converged(kind, "dist_ssp", options, staleness=2) < 0.06


def test_a_nan_is_an_error_that_names_the_key_and_the_step_can_be_taken_again() -> None:
    def work(rank: int) -> Any:
        store = made.store(rank)
        store.set_gradient_compression({"type": "1bit", "pull": "none"})
        store.set_optimizer("sgd", lr=1.0)
        store.init(["a", "b"], [torch.zeros(8), torch.zeros(4)])
        grads = {"a": torch.full((8,), 0.25), "b": torch.full((4,), 0.25)}
        outs = {"a": torch.empty(8), "b": torch.empty(4)}
        text = ""
        if rank == 1:
            wrong = {
                "a": torch.arange(8.0),
                "b": torch.tensor([1.0, float("nan"), float("inf"), 0.0]),
            }
            text = error_of(lambda: store.update(wrong, outs, Share()))
            assert not store.residuals()  # nothing was taken in, neither of "b" nor of "a"
        store.update(grads, outs, Share())
        return text, outs["a"].tolist(), outs["b"].tolist()

    with job(2) as made:
        for rank, (text, a, b) in enumerate(made.run(work)):
            assert (a, b) == ([-0.5] * 8, [-0.5] * 4)
            if rank:
                assert text.startswith(
                    "2 of 4 values for 'b' are NaN or infinite and cannot be compressed"
                )


def test_residuals_go_on_in_another_store_with_other_servers() -> None:
    count, steps = 41, 10

    def train(store: Any, rank: int, some: range, value: torch.Tensor) -> torch.Tensor:
        store.set_gradient_compression({"type": "topk", "keep": 0.1, "pull": "none"})
        store.init("w", torch.zeros(count))
        return value

    def sums(store: Any, rank: int, some: range) -> list[torch.Tensor]:
        found = []
        for step in some:
            store.push("w", torch.from_numpy(gradients(rank, steps, count)[step]))
            found.append(store.pull("w"))
        return found

    def whole(rank: int) -> list[torch.Tensor]:
        store = made.store(rank)
        train(store, rank, range(0), torch.empty(0))
        return sums(store, rank, range(steps))

    def halves(rank: int) -> list[torch.Tensor]:
        first = made.store(rank, number=1)
        train(first, rank, range(0), torch.empty(0))
        found = sums(first, rank, range(5))
        left = first.residuals()
        second = made.store(rank, number=2)
        train(second, rank, range(0), torch.empty(0))
        text = error_of(lambda: second.load_residuals({"w": torch.zeros(count + 1)}))
        assert "42 numbers for 'w', which has 41" in text
        second.load_residuals(left)
        return found + sums(second, rank, range(5, steps))

    with job(2, servers=2) as made:
        worlds, parts = made.run(whole), made.run(halves)
    for one, other in zip(worlds[0], parts[0], strict=True):
        assert torch.equal(one, other)


def test_whole_numbers_and_float64_are_never_compressed() -> None:
    """Also the workers' numbers of samples, which `Trainer.update` adds up under a key of its
    own."""
    net = [nn.Linear(1, 1, bias=False) for _ in range(2)]

    def work(rank: int) -> tuple[list[int], list[float], float]:
        store = made.store(rank, number=0)
        store.set_gradient_compression({"type": "2bit"})
        store.init(
            ["counts", "exact"],
            [torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)],
        )
        store.push(
            ["counts", "exact"], [torch.arange(3), torch.full((2,), 0.1, dtype=torch.float64)]
        )
        counts, exact = store.pull(["counts", "exact"])
        other = made.store(rank, number=1)
        trainer = Trainer(
            net[rank],
            "sgd",
            {"lr": 1.0},
            kvstore=other,
            update_on_kvstore=False,
            compression_params={"type": "fp16"},
        )
        before = net[rank].weight.item()
        net[rank](torch.ones(1 + rank, 1)).sum().backward()
        trainer.allreduce_grads()
        trainer.update(1 + rank)
        return counts.tolist(), exact.tolist(), net[rank].weight.item() - before

    with job(2) as made:
        for counts, exact, moved in made.run(work):
            assert counts == [0, 2, 4]
            assert exact == [0.2, 0.2]
            assert moved == pytest.approx(-1.0, abs=1e-6)


def test_options_differ_or_do_not_exist() -> None:
    def work(rank: int) -> list[str]:
        store = made.store(rank)
        if rank == 0:
            store.set_gradient_compression({"type": "fp16"})
        store.barrier()
        if rank == 0:
            return []
        return [
            error_of(lambda: store.set_gradient_compression({"type": "bf16"})),
            error_of(lambda: store.set_gradient_compression({"type": "3bit"})),
            error_of(lambda: store.set_gradient_compression({"type": "fp16", "pull": "3bit"})),
            error_of(lambda: store.set_gradient_compression({"threshold": 1.0})),
        ]

    with job(2) as made:
        differs, unknown, pull, none = made.run(work)[1]
    assert differs.startswith("the compression is {'push': {'name': 'bf16'}, ")
    assert "there is no codec '3bit'" in unknown
    assert "there is no codec '3bit'" in pull
    assert "write the name of a codec" in none


def test_a_state_that_is_loaded_reaches_workers_that_get_changes() -> None:
    """Loading moves 16-bit weights to the float32 copy in the state; workers must not add the next
    change to the old ones."""

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        store = made.store(rank)
        store.set_gradient_compression({"type": "none", "pull": "topk"})
        store.set_optimizer("sgd", lr=1.0, momentum=0.9, multi_precision=True)
        store.init("w", torch.zeros(300, dtype=torch.bfloat16))
        outs = {"w": torch.empty(300, dtype=torch.bfloat16)}
        store.update({"w": torch.ones(300, dtype=torch.bfloat16)}, outs, Share(1.0, 1.0))
        state = store.state()
        state.tensors["w"]["master"] = torch.full((300,), 5.0)
        state.tensors["w"]["momentum_buffer"] = torch.zeros(300)
        store.load_state(state)
        store.update({"w": torch.zeros(300, dtype=torch.bfloat16)}, outs, Share(1.0, 1.0))
        return outs["w"], store.pull("w")

    with job(2) as made:
        for out, again in made.run(work):
            assert torch.equal(out, torch.full((300,), 5.0, dtype=torch.bfloat16))
            assert torch.equal(again, out)


@pytest.mark.parametrize("kind", ["topk", "1bit", "2bit"])
def test_what_is_left_over_is_a_gradient_and_needs_no_scaling_when_the_rate_changes(
    kind: str,
) -> None:
    count, steps, workers = 40, 8, 2
    rates = [0.5, 0.5, 0.05, 0.05, 2.0, 2.0, 0.001, 0.5]
    extra: dict[str, dict[str, Any]] = {
        "topk": {"keep": 0.1},
        "1bit": {},
        "2bit": {"threshold": 0.5},
    }
    options = {"name": kind, **extra[kind]}
    codec = codec_from(options)
    weights, left = torch.zeros(count), [torch.zeros(count) for _ in range(workers)]
    for step, rate in enumerate(rates):
        total = torch.zeros(count)
        for rank in range(workers):
            whole = left[rank] + torch.from_numpy(gradients(rank, steps, count)[step])
            sent = torch.empty(count)
            codec.decode(codec.encode(whole), sent)
            left[rank] = whole - sent
            total += sent
        weights -= rate * (total * (1 / workers))

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        store = made.store(rank)
        store.set_optimizer("sgd", lr=rates[0])
        store.set_gradient_compression({**options, "pull": "none"})
        store.init("w", torch.zeros(count))
        out = torch.empty(count)
        for rate, grad in zip(rates, gradients(rank, steps, count), strict=True):
            store.update({"w": torch.from_numpy(grad)}, {"w": out}, Share(1, 1.0), [{"lr": rate}])
        return out, store.residuals()["w"]

    with job(workers) as made:
        for rank, (ours, residual) in enumerate(made.run(work)):
            torch.testing.assert_close(ours, weights, rtol=1e-6, atol=1e-7)
            assert torch.equal(residual, left[rank])
