"""Dropout, crops and flips by keys: probability, independence, and what a mask depends on."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

import allhands
from allhands.errors import UserError
from allhands.federated import keyed_noise
from allhands.federated.keyed_noise import KeyedDropout, KeyedNoise
from allhands.models import RandomCrop, RandomFlip
from tests.federated.executors.comparing import augmented, difference, trained

CPU = torch.device("cpu")


def masks(
    layer: KeyedDropout,
    keys: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    made = []
    for key in keys:
        layer.key, layer.calls, layer.over = key, 0, False
        made.append(layer(torch.ones(shape, dtype=dtype)))
    return torch.stack(made)


def keyed(layer: nn.Module) -> tuple[KeyedDropout, KeyedNoise]:
    net = nn.Sequential(layer).train()
    noise = KeyedNoise(net, CPU)
    return net[0], noise


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_numbers_are_dropped_with_their_probability_and_the_others_scaled(p):
    layer, noise = keyed(nn.Dropout(p))
    drawn = masks(layer, noise.keys(1, 0, 0, 50)[:, 0], (4000,), torch.float64)
    kept = drawn != 0
    assert torch.equal(drawn[kept], torch.full_like(drawn[kept], 1 / (1 - p)))
    # 200,000 draws: five standard deviations
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5


def test_masks_of_different_keys_and_positions_are_not_correlated():
    layer, noise = keyed(nn.Dropout(0.3))
    kept = (masks(layer, noise.keys(1, 0, 0, 300)[:, 0], (1024,)) != 0).double()
    for table in (kept, kept.T):
        centred = table - table.mean(1, keepdim=True)
        rows = centred / centred.norm(dim=1, keepdim=True)
        off = (rows @ rows.T).fill_diagonal_(0.0) * table.shape[1] ** 0.5
        assert float(off.abs().max()) < 6.5
        assert abs(float(off.square().mean()) - 1) < 0.03


def test_keys_depend_on_seed_round_client_step_and_layer_only():
    noise = KeyedNoise(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2), nn.Dropout2d(0.5)), CPU)
    keys = noise.keys(7, 3, 5, 4)
    assert keys.shape == (4, 2)
    assert len(set(keys.flatten().tolist())) == 8
    assert torch.equal(noise.keys(7, 3, 5, 2), keys[:2])
    assert not torch.equal(noise.keys(7, 3, 6, 4), keys)
    assert not torch.equal(noise.keys(7, 4, 5, 4), keys)


def test_a_mask_is_a_known_number_so_that_it_stays_the_same_on_every_machine():
    layer, _ = keyed(nn.Dropout(0.5))
    layer.key = torch.tensor(12345, dtype=torch.int32)
    # Python integers of any size, wrapped by hand to 32 bits
    expected = []
    for place in range(64):
        x = place * 0x9E3779B1 % 2**32
        x = signed(x ^ (signed(x) >> 16) % 2**32)
        x = signed((x ^ 12345) * 0x85EBCA6B % 2**32)
        x = signed((x ^ (x >> 15)) * 0xC2B2AE35 % 2**32)
        expected.append(2.0 if x >= 0 else 0.0)
    assert layer(torch.ones(64)).tolist() == expected


def signed(value: int) -> int:
    value %= 2**32
    return value - 2**32 if value >= 2**31 else value


def test_whole_channels_are_dropped_and_a_short_batch_draws_the_first_of_a_long_one():
    layer, noise = keyed(nn.Dropout2d(0.5))
    drawn = masks(layer, noise.keys(1, 0, 0, 1)[:, 0], (6, 8, 3, 3))[0]
    assert torch.equal(drawn, drawn[:, :, :1, :1].expand(6, 8, 3, 3))
    assert 0 < int((drawn == 0).sum()) < drawn.numel()
    layer.calls = 0
    assert torch.equal(layer(torch.ones(2, 8, 3, 3)), drawn[:2])


def test_under_vmap_each_client_draws_its_own_mask():
    layer, noise = keyed(nn.Dropout(0.5))
    keys, x = noise.keys(1, 0, 0, 3)[:, 0], torch.ones(3, 40)

    def one(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        noise.begin()
        return functional_call(layer, {"key": key}, (x,))

    assert torch.equal(vmap(one)(keys, x), masks(layer, keys, (40,)))


def test_calls_again_in_the_backward_pass_are_only_served_when_unambiguous():
    layer, noise = keyed(nn.Dropout(0.5))
    noise.begin()
    x = torch.ones(100)
    assert not torch.equal(layer(x), layer(x))
    noise.end()
    with pytest.raises(UserError, match="a layer of its own"):
        layer(x)

    net = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 1)).double()
    noise = KeyedNoise(net, CPU)
    noise.set(noise.keys(1, 0, 0, 1)[0])
    gradients = []
    for again in (False, True):
        noise.begin()
        given = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        output = checkpoint(net, given, use_reentrant=False) if again else net(given)
        noise.end()
        gradients.append(torch.autograd.grad(output.sum(), list(net.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_masks_of_steps_that_come_are_made_at_once_and_are_those_of_each_step(monkeypatch):
    given = nn.Sequential(
        nn.Dropout(0.3), nn.Dropout2d(0.5), nn.Sequential(RandomFlip()), nn.Dropout(0.1)
    )
    x = torch.rand(6, 2, 5, 5, generator=torch.Generator().manual_seed(1))

    def drawn(ahead: int) -> tuple[list[torch.Tensor], int]:
        monkeypatch.setattr(keyed_noise, "MOST_AHEAD", {"cpu": ahead})
        together: list[int] = []
        mix = keyed_noise._mix

        def noted(places: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            together.extend([len(key)] if key.dim() else [])
            return mix(places, key)

        monkeypatch.setattr(keyed_noise, "_mix", noted)
        net = copy.deepcopy(given).train()
        noise, made = KeyedNoise(net, CPU), []
        noise.set_steps(noise.keys_of(1, 0, [0, 1], 3).flatten(0, 1))
        for step, size in enumerate((6, 6, 4) * 2):
            noise.set_step(step)
            noise.begin()
            made += [net(x[:size]), net[0](x[:size])]  # the second call of a layer
            noise.end()
        monkeypatch.setattr(keyed_noise, "_mix", mix)
        return made, len(together)

    (alone, none), (together, few) = drawn(0), drawn(10_000)
    # Once for each of three layers of dropout; and of three steps, only where so many numbers do.
    assert (none, few, drawn(3 * 12)[1]) == (0, 3, 2)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert len({one.numpy().tobytes() for one in alone}) == len(alone)


def test_layers_are_replaced_without_a_trace_in_the_state():
    inner = nn.Dropout(0.2, inplace=True)
    net = nn.Sequential(
        nn.Linear(2, 2), inner, nn.Sequential(inner, nn.AlphaDropout(0.1), nn.Dropout1d(1.0))
    )
    before = copy.deepcopy(net.state_dict())
    noise = KeyedNoise(net, CPU)
    assert list(net.state_dict()) == list(before)
    assert noise.names == ["1", "2.2"]
    assert net[1] is net[2][0]
    assert isinstance(net[2][1], nn.AlphaDropout)
    x = torch.ones(2, 5)
    assert net[1](x) is x
    assert float(net[2][2](torch.ones(2, 3, 4)).abs().max()) == 0.0
    net.eval()
    assert torch.equal(net[2][2](torch.ones(2, 3, 4)), torch.ones(2, 3, 4))


def test_crops_and_flips_are_a_function_of_the_key_and_the_place_in_the_batch():
    net = nn.Sequential(RandomCrop(2), nn.Sequential(RandomFlip())).train()
    before = list(net.state_dict())
    noise = KeyedNoise(net, CPU)
    assert (noise.names, list(net.state_dict())) == (["0", "1.0"], before)
    x = torch.arange(5 * 7.0).view(1, 1, 5, 7).expand(40, 2, 5, 7)

    def drawn(keys: torch.Tensor, count: int) -> torch.Tensor:
        noise.set(keys)
        noise.begin()
        return net(x[:count])

    keys = noise.keys(1, 0, 0, 2)
    outside = torch.get_rng_state()
    made = drawn(keys[0], 40)
    assert torch.equal(torch.get_rng_state(), outside)
    assert torch.equal(drawn(keys[0], 13), made[:13])  # a short batch draws the first of a long one
    assert not torch.equal(drawn(keys[1], 40), made)
    assert len({image.numpy().tobytes() for image in made}) > 20
    net.eval()
    assert torch.equal(drawn(keys[0], 40), x)


def test_keyed_crops_and_flips_are_evenly_spread():
    net = nn.Sequential(RandomCrop(1), RandomFlip()).train()
    noise = KeyedNoise(net, CPU)
    x = torch.arange(12.0).view(1, 1, 3, 4).expand(64, 1, 3, 4)
    seen: dict[bytes, int] = {}
    for keys in noise.keys(2, 0, 0, 100):
        noise.set(keys)
        noise.begin()
        for image in net(x).numpy():
            seen[image.tobytes()] = seen.get(image.tobytes(), 0) + 1
    # 9 crops, turned or not; chi-square with 17 degrees of freedom: 41 is exceeded once in a
    # thousand
    assert len(seen) == 18
    assert sum((count - 6400 / 18) ** 2 / (6400 / 18) for count in seen.values()) < 41


def test_under_vmap_each_client_crops_and_flips_for_itself():
    net = nn.Sequential(RandomCrop(2, mode="constant"), RandomFlip()).train()
    noise = KeyedNoise(net, CPU)
    keys, x = noise.keys(1, 0, 0, 3), torch.rand(3, 6, 2, 5, 5)

    def one(keys: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        noise.begin()
        return functional_call(net, {"0.key": keys[0], "1.key": keys[1]}, (x,))

    alone = torch.stack([one(own, images) for own, images in zip(keys, x, strict=True)])
    assert torch.equal(vmap(one)(keys, x), alone)
    assert not torch.equal(alone, x)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_draw_the_same():
    # what is compared with 0, the middle of 32 bits, is the sign of a product that overflows
    layer, noise = keyed(nn.Dropout2d(0.5))
    keys, x = noise.keys(1, 0, 0, 3)[:, 0], torch.rand(3, 6, 2, 5, 5)

    def one(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, {"key": key}, (x,))

    noise.begin()
    plain = vmap(one)(keys, x)
    noise.begin()
    with torch._inductor.config.patch(compile_threads=1):
        assert torch.equal(torch.compile(vmap(one), fullgraph=True, dynamic=False)(keys, x), plain)


class _OfTheUser(RandomFlip):
    pass


def test_clients_one_by_one_and_stacked_see_the_same_crops_and_flips():
    allhands.init(device="cpu")
    try:
        # clients of 10, 25, 17, 3 and 8 samples: some have less than a batch of 4, others a short
        # last one, which is padded
        given = {"net": augmented, "batch_size": 4, "epochs": 2}
        assert (
            difference(
                ["serial", *({"name": "stacked", "chunk": chunk} for chunk in (1, 3, 5))], **given
            )
            < 1e-12
        )
        # and these are not the whole images: training on those ends elsewhere
        plain = trained(
            "serial",
            net=nn.Sequential(*(nn.Identity() for _ in range(3)), augmented()[3]),
            batch_size=4,
            epochs=2,
        )
        assert (
            float(
                (plain[0] - trained("serial", net=augmented(), batch_size=4, epochs=2)[0])
                .abs()
                .max()
            )
            > 1e-3
        )
        with pytest.raises(UserError, match="randint"):  # a class of its own keeps to the generator
            trained("stacked", net=nn.Sequential(_OfTheUser(), augmented()))
    finally:
        allhands.finalize()
