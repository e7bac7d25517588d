"""Tensors that do not lie on the CPU in order: of a GPU, transposed, of channels_last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from allhands.kvstore import Trainer
from allhands.kvstore.staging import Staging
from tests.kvstore.serving import job


def _check(device: torch.device) -> None:
    staging = Staging()
    whole = torch.arange(24.0, device=device).view(4, 6)
    given = {"plain": whole.clone(), "turned": whole.t(), "part": whole[:, 1:3]}
    for _ in range(2):
        flat = staging.values(given)
        for name, value in given.items():
            assert flat[name].device.type == "cpu"
            assert flat[name].tolist() == value.reshape(-1).tolist()
    outs = {name: torch.zeros_like(value) for name, value in given.items()}
    outs["turned"] = torch.zeros(4, 6, device=device).t()
    room = staging.room(outs)
    for number, name in enumerate(room):
        room[name].copy_(torch.arange(len(room[name])) + number)
    staging.put(room, outs)
    for number, (name, out) in enumerate(outs.items()):
        assert out.reshape(-1).tolist() == [
            float(value + number) for value in range(out.numel())
        ], name


def test_values_travel_in_order_and_come_back_to_their_place() -> None:
    _check(torch.device("cpu"))
    staging = Staging()
    plain = torch.arange(6.0)
    assert staging.values({"a": plain})["a"].data_ptr() == plain.data_ptr()
    assert staging.room({"a": plain})["a"].data_ptr() == plain.data_ptr()


@pytest.mark.gpu
def test_values_of_a_gpu_travel_through_page_locked_memory() -> None:
    _check(torch.device("cuda"))
    staging = Staging()
    assert staging.values({"a": torch.zeros(5, device="cuda")})["a"].is_pinned()


def _trained(device: str) -> list[torch.Tensor]:
    """Two workers, two servers, a model with a weight of channels_last."""
    draw = torch.Generator().manual_seed(3)
    images = torch.randn(5, 2, 6, 3, 8, 8, generator=draw)
    targets = torch.randint(4, (5, 2, 6), generator=draw)

    def model() -> nn.Module:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 4))
        return net.to(device, memory_format=torch.channels_last)

    nets = [model() for _ in range(2)]
    loss = nn.CrossEntropyLoss(reduction="sum")
    with job(2, 2) as made:

        def work(rank: int) -> None:
            net = nets[rank]
            trainer = Trainer(
                net, "adam", {"learning_rate": 0.01}, kvstore=made.store(rank), clip_norm=1.0
            )
            for step in range(5):
                count = 6 - 2 * rank
                loss(
                    net(images[step, rank, :count].to(device)),
                    targets[step, rank, :count].to(device),
                ).backward()
                trainer.step(count)

        made.run(work)
    for first, second in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(first, second)
    alone = model()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        both = torch.cat([images[step, 0], images[step, 1, :4]]).to(device)
        (
            loss(alone(both), torch.cat([targets[step, 0], targets[step, 1, :4]]).to(device)) / 10
        ).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
    return [
        (mine - reference).abs().max()
        for mine, reference in zip(nets[0].parameters(), alone.parameters(), strict=True)
    ]


def test_weights_of_channels_last_are_trained_like_alone() -> None:
    assert max(_trained("cpu")) < 1e-6


@pytest.mark.gpu
def test_weights_of_a_gpu_are_trained_like_alone() -> None:
    torch.backends.cudnn.allow_tf32 = False
    assert max(_trained("cuda")) < 2e-5
