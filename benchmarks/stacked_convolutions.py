"""Forward and backward passes of stacked clients' convolutions in both forms of the executor
`stacked`, shape by shape.

    python benchmarks/stacked_convolutions.py [--clients 50] [--images 10] [--device cuda] [--name
    NAME]

The layers of ResNet-18 for images of 32 x 32, and the second of pfl-research's CNN. `product` is
the product of weights with patches, `grouped` is cuDNN's; `chosen` is the one that `UnfoldedConv2d`
takes. On CUDA each is recorded in a graph and replayed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from report import machine, save_json
from torch.func import functional_call, vmap

from allhands.federated.executors.unfolded import UnfoldedConv2d, _Grouped, _Product

# Channels in and out, side of the image, kernel, stride, padding.
SHAPES = [
    (3, 64, 32, 3, 1, 1),
    (64, 64, 32, 3, 1, 1),
    (64, 128, 32, 3, 2, 1),
    (64, 128, 32, 1, 2, 0),
    (128, 128, 16, 3, 1, 1),
    (128, 256, 16, 3, 2, 1),
    (128, 256, 16, 1, 2, 0),
    (256, 256, 8, 3, 1, 1),
    (256, 512, 8, 3, 2, 1),
    (256, 512, 8, 1, 2, 0),
    (512, 512, 4, 3, 1, 1),
    (32, 64, 30, 3, 1, 0),
]


def milliseconds(step: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Of one call, the mean of `repeats`."""
    if device.type != "cuda":
        step()
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        return 1000 * (time.perf_counter() - began) / repeats
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    for _ in range(repeats):
        graph.replay()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / repeats


def measure(shape: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
    """A row: the shape, and milliseconds of each form."""
    inside, outside, side, kernel, stride, padding = shape
    device = torch.device(args.device)
    layer = UnfoldedConv2d(inside, outside, kernel, stride, padding, bias=False).to(device)
    weights = torch.randn(args.clients, *layer.weight.shape, device=device, requires_grad=True)
    images = torch.randn(
        args.clients, args.images, inside, side, side, device=device, requires_grad=True
    )
    given = (stride, stride), (padding, padding), (1, 1)
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "product": lambda weight, image: _Product.apply(image, weight, *given)[0],
        "grouped": lambda weight, image: _Grouped.apply(image, weight, *given),
        "chosen": lambda weight, image: functional_call(layer, {"weight": weight}, image),
    }
    row: dict[str, Any] = {"shape": shape}
    for name, call in calls.items():
        batched = vmap(call)
        probe = torch.randn_like(batched(weights, images))
        row[name] = milliseconds(
            lambda batched=batched, probe=probe: torch.autograd.grad(
                batched(weights, images), (weights, images), probe
            ),
            device,
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--images", type=int, default=10, help="of a client's batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two clients with two images, to see that the script works",
    )
    parser.add_argument("--name", default="stacked_convolutions", help="of the file of results")
    args = parser.parse_args()
    args.clients, args.images = (2, 2) if args.quick else (args.clients, args.images)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    rows = []
    for shape in SHAPES:
        rows.append(measure(shape, args))
        print(
            "{:4d} to {:4d} channels, side {:2d}, kernel {}, stride {}, padding {}".format(*shape),
            *(f"{name} {rows[-1][name]:7.3f} ms" for name in ("product", "grouped", "chosen")),
            flush=True,
        )
    if not args.quick:
        save_json(
            args.name,
            {"machine": machine(), "clients": args.clients, "images": args.images, "rows": rows},
        )


if __name__ == "__main__":
    main()
