"""What GPUs compute and links carry: published peaks, and what of them a training gets."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from allhands.errors import UserError, did_you_mean

# What large matrix products and copies get of the published peaks: 789 of 989 TFLOP/s were measured
# on an H200 for a product of 8,192 squares.
_OF_PRODUCTS = 0.8
_OF_MEMORY = 0.8
# What a ring of NCCL gets of a link.
_OF_LINK = 0.8
_GIGA = 1e9


def workspaces(hopper: bool) -> int:
    """Bytes that cuBLAS takes of a GPU for a thread of each pass, as torch.backends.cuda documents.

    Args:
        hopper: the GPU is of this kind or a later one.
    """
    return (64 if hopper else 16) * 2**20


@dataclass(frozen=True)
class Card:
    """A kind of GPU, or "cpu": one thread on a core of this machine.

    Attributes:
        name: how it is asked for.
        memory: bytes.
        flops: floating point operations a second of matrix products, by bytes of a number.
        bandwidth: bytes a second of its memory.
        libraries: bytes of its memory that cuBLAS takes for its workspaces.
    """

    name: str
    memory: float
    flops: Mapping[int, float]
    bandwidth: float
    libraries: int = workspaces(hopper=False)

    def seconds(self, flops: int, moved: int, width: int) -> float:
        """Of an operation, by the slower of what it computes and what it moves."""
        peak = self.flops.get(width, self.flops[4])
        return max(flops / (peak * _OF_PRODUCTS), moved / (self.bandwidth * _OF_MEMORY))


def _card(name: str, gb: float, fp32: float, bf16: float, tb: float, hopper: bool = False) -> Card:
    flops = {8: fp32 / 2 * 1e12, 4: fp32 * 1e12, 2: bf16 * 1e12}
    return Card(name, gb * _GIGA, flops, tb * 1e12, workspaces(hopper))


# Data sheets of NVIDIA: memory in GB, fp32 and dense bf16 (fp16) TFLOP/s, TB/s.
CARDS = {
    card.name: card
    for card in (
        _card("b200", 180, 80, 2250, 8.0, hopper=True),
        _card("h200", 141, 67, 989, 4.8, hopper=True),
        _card("h100", 80, 67, 989, 3.35, hopper=True),
        _card("a100", 80, 19.5, 312, 2.039),
        _card("a100-40", 40, 19.5, 312, 1.555),
        _card("l40s", 48, 91.6, 362, 0.864),
        _card("a10", 24, 31.2, 125, 0.6),
        _card("v100", 32, 15.7, 125, 0.9),
        _card("t4", 16, 8.1, 65, 0.32),
        _card("rtx4090", 24, 82.6, 165, 1.008),
    )
}


CPU = "cpu"
# A core's figures stand in for operations that cannot be measured.
CARDS[CPU] = Card(CPU, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), {4: 5e10}, 1e10, 0)


@dataclass(frozen=True)
class Link:
    """What connects two ranks: a message of n bytes takes ``latency + n / bandwidth`` seconds."""

    name: str
    bandwidth: float
    latency: float

    def seconds(self, sent: float, steps: float) -> float:
        return steps * self.latency + sent / self.bandwidth


def _link(name: str, gigabytes: float, microseconds: float) -> Link:
    return Link(name, gigabytes * _GIGA * _OF_LINK, microseconds * 1e-6)


# GB/s in one direction for each GPU, and microseconds of a step of a ring.
LINKS = {
    link.name: link
    for link in (
        _link("nvlink5", 900, 3),
        _link("nvlink4", 450, 3),
        _link("nvlink3", 300, 3),
        _link("nvlink", 450, 3),
        _link("pcie5", 63, 5),
        _link("pcie4", 31.5, 5),
        _link("pcie3", 15.75, 5),
        _link("pcie", 31.5, 5),
        _link("ib800", 100, 6),
        _link("ib400", 50, 6),
        _link("ib200", 25, 6),
        _link("ib100", 12.5, 6),
        _link("eth400", 50, 15),
        _link("eth100", 12.5, 30),
        _link("eth25", 3.125, 40),
        _link("eth10", 1.25, 50),
        _link("eth1", 0.125, 60),
    )
}


@dataclass(frozen=True)
class Links:
    """Those within a host, and between hosts."""

    inside: Link
    between: Link

    def seconds(self, sent: float, kind: str, size: int, hosts: int) -> float:
        """Of a collective of `size` ranks on so many hosts, each of which sends `sent` bytes."""
        link = self.inside
        if hosts > 1:
            slower = min(self.inside.bandwidth, self.between.bandwidth)
            link = Link("", slower, self.between.latency)
        return link.seconds(sent, rounds_of(kind, size))

    def cpu(self, sent: float, kind: str, size: int, hosts: int) -> float:
        """The processor's seconds of the same: none where GPUs communicate."""
        return 0.0


def rounds_of(kind: str, size: int) -> int:
    """How many latencies a collective of `size` ranks has: those of a tree, both ways where all
    ranks add up."""
    if kind in ("send", "recv"):
        return 1
    ways = 2 if kind == "all_reduce" else 1
    return ways * max(1, math.ceil(math.log2(size)))


def card_named(name: str) -> Card:
    """The card of this name."""
    found = CARDS.get(name.lower())
    if found is None:
        raise UserError(
            f"card '{name}' is not known{did_you_mean(name, CARDS)} Known are: {', '.join(CARDS)}"
        )
    return found


def card_of(device: str) -> Card | None:
    """The card that PyTorch calls so ("NVIDIA H200", "cpu"); None where it is of another kind."""
    words = re.split(r"[\s-]+", device.lower())
    words += ["".join(pair) for pair in itertools.pairwise(words)]
    found = next((CARDS[word] for word in words if word in CARDS), None)
    smaller = "" if found is None else f"{found.name}-{found.memory / 2 / _GIGA:.0f}"
    is_smaller = any(word == f"{smaller.rpartition('-')[2]}gb" for word in words)
    return CARDS[smaller] if is_smaller and smaller in CARDS else found


def card_for(name: str | None, *devices: str) -> Card:
    """The card of a plan.

    Args:
        name: as it was asked for; None takes the one whose times are known, or "h100".
        devices: on which operations were or will be measured, by PyTorch's names.

    Raises:
        UserError: it is another one than that whose times are known, or none was asked for and
            they are of a device that is no known card.
    """
    measured = {device: card_of(device) for device in devices}
    known = {device: card for device, card in measured.items() if card is not None}
    other = next((device for device in devices if device not in known), None)
    if name is None and other is not None:
        raise UserError(
            f"the operations were measured on {other}, of which a plan knows no memory and no "
            "peaks; write the card that is most like it, and its memory, such as --card l40s "
            f"--memory 24GB. Known are: {', '.join(CARDS)}"
        )
    of_gpu = (card.name for card in known.values() if card.name != CPU)
    asked = card_named(name or next(of_gpu, "h100"))
    for device, card in known.items():
        if card.name == asked.name:
            continue
        if card.name == CPU:
            raise UserError(
                f"operations measured on a processor say nothing of {asked.name}. Plan for "
                "processors: --card cpu; or measure on a machine with the GPU, with --measure "
                "--profile FILE, and read that file here; or leave both out, for the card's "
                "published peaks"
            )
        raise UserError(
            f"the operations were measured on {device}, and the plan is for {asked.name}; leave "
            "out --card, or the measurements"
        )
    return asked


def links_named(text: str) -> Links:
    """Links as they are written: ``"nvlink+ib400"``, within a host and between hosts; one alone is
    both; ``"12.5GB/s"`` is a link of that bandwidth.
    """
    parts = text.split("+")
    if len(parts) > 2:
        raise UserError(
            f"link '{text}' has {len(parts)} parts; write one within a host and one between hosts, "
            "such as nvlink+ib400"
        )
    links = [_link_named(part.strip()) for part in parts]
    return Links(links[0], links[-1])


def _link_named(name: str) -> Link:
    if name.lower() in LINKS:
        return LINKS[name.lower()]
    match = re.fullmatch(r"([\d.]+)\s*GB/s", name, re.IGNORECASE)
    if match is None:
        raise UserError(
            f"link '{name}' is not known{did_you_mean(name, LINKS)} Known are: "
            f"{', '.join(LINKS)}, or a bandwidth such as 12.5GB/s"
        )
    return Link(name, float(match[1]) * _GIGA, 10e-6)


def bytes_of(text: str | float) -> float:
    """A size of memory, in bytes: a number, or text such as "80GB", "24 GiB", "512MB"."""
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text > 0:
        return float(text)
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT])(i?)B\s*", str(text), re.IGNORECASE)
    if match is None or not _is_number(match[1]):
        raise UserError(f"memory {text!r} is no size; write for example 80GB or 24GiB")
    power = "KMGT".index(match[2].upper()) + 1
    return float(match[1]) * (1024 if match[3] else 1000) ** power


def bandwidth_of(text: str) -> float:
    """Bytes a second of a link such as "50Mbit/s", "1.5Gbit/s" or "12.5GB/s"."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG])(bit|B)/s\s*", text, re.IGNORECASE)
    if match is None or not _is_number(match[1]) or not float(match[1]):
        raise UserError(f"bandwidth {text!r} is none; write for example 50Mbit/s or 12.5GB/s")
    bits = 8 if match[3].lower() == "bit" else 1
    return float(match[1]) * 1000 ** ("KMG".index(match[2].upper()) + 1) / bits


def _is_number(text: str) -> bool:
    return text.count(".") <= 1 and text.strip(".") != ""
