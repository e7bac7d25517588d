"""Names of cards and links, and sizes of memory."""

from __future__ import annotations

import pytest

from allhands import UserError
from allhands.planning.machines import CARDS, bytes_of, card_for, card_named, card_of, links_named


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80e9), ("24 GiB", 24 * 2**30), ("512MB", 512e6), ("1.5tb", 1.5e12), (7, 7.0)],
)
def test_sizes(text: str | float, size: float) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["80", "eighty GB", "80 GBs", "-80GB", "1.2.3GB", ".GB", 0, True])
def test_what_is_no_size_is_refused(text: str | float) -> None:
    with pytest.raises(UserError, match="write for example 80GB or 24GiB"):
        bytes_of(text)


def test_links() -> None:
    both = links_named("nvlink+eth100")
    assert both.inside.bandwidth > both.between.bandwidth
    one = links_named("12.5GB/s")
    assert one.inside == one.between
    assert one.inside.bandwidth == 12.5e9
    # A ring over hosts is as slow as the link between them.
    assert both.seconds(1e9, "all_gather", 16, 2) > both.seconds(1e9, "all_gather", 16, 1)
    assert both.seconds(0, "all_reduce", 16, 2) == pytest.approx(2 * 4 * both.between.latency)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="card 'h10'.*did you mean 'h100'"):
        card_named("h10")
    with pytest.raises(UserError, match="link 'ib40'.*did you mean 'ib400'"):
        links_named("nvlink+ib40")
    with pytest.raises(UserError, match="has 3 parts"):
        links_named("nvlink+ib400+eth1")


def test_an_operation_is_as_slow_as_what_it_computes_or_moves() -> None:
    card = CARDS["h100"]
    assert card.seconds(10**15, 1, 2) == pytest.approx(10**15 / (0.8 * 989e12))
    assert card.seconds(1, 10**12, 2) == pytest.approx(10**12 / (0.8 * 3.35e12))
    assert card.seconds(10**15, 1, 4) > card.seconds(10**15, 1, 2)


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla T4", "t4"),
        ("cpu", "cpu"),
        ("NVIDIA L40", None),
    ],
)
def test_cards_are_known_by_the_names_that_pytorch_gives_them(
    device: str, card: str | None
) -> None:
    found = card_of(device)
    assert (None if found is None else found.name) == card


def test_a_plan_is_for_the_card_whose_operations_were_measured() -> None:
    assert card_for(None).name == "h100"
    assert card_for(None, "NVIDIA H200").name == "h200"
    assert card_for("H200", "NVIDIA H200").name == "h200"
    assert card_for("a10", "NVIDIA L40").name == "a10"
    assert card_for("cpu", "cpu").name == "cpu"
    with pytest.raises(UserError, match=r"on NVIDIA L40, .* write .* --card l40s --memory 24GB"):
        card_for(None, "NVIDIA L40")
    with pytest.raises(UserError, match="were measured on NVIDIA H200, and the plan is for a100"):
        card_for("a100", "NVIDIA H200")
    for card in (None, "h100"):
        with pytest.raises(UserError, match="measured on a processor say nothing of h100"):
            card_for(card, "cpu")
