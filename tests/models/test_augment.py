from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from allhands.errors import UserError
from allhands.models import RandomCrop, RandomFlip

CPU = torch.device("cpu")


def images(
    count: int, high: int = 6, wide: int = 9, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Images of which all pixels differ."""
    return (
        (torch.arange(3 * high * wide).view(3, high, wide) + 1).expand(count, -1, -1, -1).to(dtype)
    )


def windows(x: torch.Tensor, padding: int, mode: str) -> list[torch.Tensor]:
    """The crops that there are of an image, C x H x W, by padding and cutting."""
    high, wide = x.shape[1:]
    padded = F.pad(x[None].double(), (padding,) * 4, mode=mode)[0].to(x.dtype)
    side = range(2 * padding + 1)
    return [padded[:, i : i + high, j : j + wide] for i in side for j in side]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("mode", ["reflect", "constant"])
def test_every_crop_of_the_padded_image_occurs_equally_often_and_nothing_else(mode, dtype):
    torch.manual_seed(0)
    x, padding, rounds = images(2500, dtype=dtype), 2, 4
    known = {window.numpy().tobytes(): 0 for window in windows(x[0], padding, mode)}
    assert len(known) == 25
    for _ in range(rounds):
        for image in RandomCrop(padding, mode)(x).numpy():
            known[image.tobytes()] += 1  # a KeyError is a crop that there is not
    # chi-square with 24 degrees of freedom: 51 is exceeded once in a thousand
    expected = rounds * len(x) / 25
    assert sum((count - expected) ** 2 / expected for count in known.values()) < 51


def test_all_eighty_one_places_of_the_usual_padding_occur_and_are_those_that_the_numbers_say():
    layer, x = RandomCrop(4), images(81, 8, 8)
    drawn = torch.tensor(
        [[-(-i * 2**32 // 9), -(-j * 2**32 // 9)] for i in range(9) for j in range(9)]
    )
    for numbers in (drawn, drawn + 2**32 // 9 - 1):  # the first and the last number of each place
        assert torch.equal(layer.change(x, numbers), torch.stack(windows(x[0], 4, "reflect")))


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_images_are_turned_left_to_right_with_their_probability(p):
    torch.manual_seed(0)
    x = images(10_000, 2, 3)
    made = RandomFlip(p)(x)
    turned = (made == x.flip(-1)).flatten(1).all(1)
    assert torch.equal(made[~turned], x[~turned])
    assert abs(float(turned.double().mean()) - p) <= 5 * (p * (1 - p) / len(x)) ** 0.5


def test_each_image_draws_for_itself_from_the_global_generator():
    net, x = nn.Sequential(RandomCrop(2), RandomFlip()), images(50)
    torch.manual_seed(3)
    first, second = net(x), net(x)
    torch.manual_seed(3)
    assert torch.equal(net(x), first)
    assert not torch.equal(first, second)
    assert len({image.numpy().tobytes() for image in first}) > 20


def test_evaluation_leaves_images_alone_and_draws_nothing():
    net, x = nn.Sequential(RandomCrop(2), RandomFlip(1.0)).eval(), images(4)
    before = torch.get_rng_state()
    assert net(x) is x
    assert torch.equal(torch.get_rng_state(), before)
    assert not net.state_dict()


def test_gradients_reach_the_pixels_that_are_shown():
    x = images(3, 4, 4, torch.float64).clone().requires_grad_()
    torch.manual_seed(1)
    assert torch.autograd.gradcheck(
        lambda x: RandomFlip(1.0).change(
            RandomCrop(1).change(x, torch.tensor([[0, 2**32 - 1]] * 3)), torch.zeros(3, 1)
        ),
        (x,),
    )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: RandomCrop(4, mode="edge"), "mode='edge'; it must be 'reflect' or 'constant'"),
        (lambda: RandomCrop(-1), "padding=-1; it must be a whole number"),
        (lambda: RandomCrop((4, 4)), r"padding=\(4, 4\); it must be a whole number"),
        (lambda: RandomFlip(1.5), "p=1.5; it must be a probability from 0 to 1"),
        (lambda: RandomFlip("half"), "p='half'.*it must be a probability from 0 to 1"),
        (
            lambda: RandomCrop(4)(torch.ones(2, 3, 4, 9)),
            "4 x 9 pixels cannot be mirrored over 4; set padding to at most 3, or mode",
        ),
        (
            lambda: RandomCrop(1)(torch.ones(3, 8, 8)),
            r"RandomCrop takes batches of images.*\(3, 8, 8\)",
        ),
        (lambda: RandomFlip()(torch.ones(8, 8)), r"RandomFlip takes batches of images.*\(8, 8\)"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(made, message):
    with pytest.raises(UserError, match=message):
        made()
