"""The GPT of `allhands.models` cut up by hand with PyTorch's own means: what `gpt_parallel.py`
measures against.

Each function makes the model ready on this rank and returns a function that takes one optimizer
step on this rank's samples (for `tensor` and `pipeline`: all samples), N x T tokens and the N x T
that follow them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from allhands.models.transformer import GPT, Layer

Step = Callable[[Tensor, Tensor], None]
RATE = 3e-4


def narrowed(device: torch.device) -> AbstractContextManager[None]:
    """bf16 on a GPU."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def optimizer_for(parameters: list[Any], device: torch.device) -> torch.optim.AdamW:
    """Over parameters, or groups of them."""
    return torch.optim.AdamW(parameters, lr=RATE, fused=device.type == "cuda")


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def fsdp(sizes: dict[str, int], device: torch.device) -> Step:
    """fully_shard of each layer and of the rest, made on the meta device; parameters travel and
    compute in bf16."""
    with torch.device("meta"):
        model = GPT(**sizes, tied=False)
    narrow = device.type == "cuda"
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else MixedPrecisionPolicy()
    )
    for_loss = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        if narrow
        else MixedPrecisionPolicy()
    )
    mesh = init_device_mesh(device.type, (get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=for_loss)
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.Linear, nn.Embedding)):
            module.reset_parameters()
    for name, parameter in model.named_parameters():
        model.start_parameter(name, parameter)
    optimizer = optimizer_for(list(model.parameters()), device)

    def step(tokens: Tensor, following: Tensor) -> None:
        optimizer.zero_grad()
        mean_loss(model(tokens), following).backward()
        optimizer.step()

    return step


def tensor(sizes: dict[str, int], device: torch.device) -> Step:
    """Attention heads, the feed-forward and the vocabulary over all ranks.

    qkv's rows are dealt as they lie, so that a rank's queries, keys and values are other rows than
    in the plain model. That is as fast, and weights that are drawn at random do not know the
    difference.
    """
    with device:
        torch.manual_seed(0)
        model = GPT(**sizes, tied=False)
    mesh = init_device_mesh(device.type, (get_world_size(),), mesh_dim_names=("tp",))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attn.qkv": ColwiseParallel(),
        "layers.*.attn.out": RowwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    cut = [p for p in model.parameters() if hasattr(p, "placements")]
    whole = [p for p in model.parameters() if not hasattr(p, "placements")]
    # One fused call cannot mix the two kinds.
    optimizer = optimizer_for([{"params": cut}, {"params": whole}], device)

    def step(tokens: Tensor, following: Tensor) -> None:
        optimizer.zero_grad()
        with narrowed(device):
            loss = mean_loss(model(tokens), following)
        loss.backward()
        optimizer.step()

    return step


class First(nn.Module):
    """Tokens to activations."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embed, self.position = model.embed, model.position

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )


def balanced(sizes: dict[str, int], stages: int) -> list[int]:
    """Layers of each stage such that the slowest has as little as possible to multiply; the last
    one has the head too."""
    layer, head = 12 * sizes["width"] ** 2, sizes["width"] * sizes["vocab_size"]
    splits = (
        [b - a for a, b in itertools.pairwise((0, *cut, sizes["layers"]))]
        for cut in itertools.combinations(range(1, sizes["layers"]), stages - 1)
    )
    return min(splits, key=lambda counts: max(*counts[:-1], counts[-1] + head / layer))


def pipeline(sizes: dict[str, int], device: torch.device, microbatches: int) -> Step:
    """Consecutive layers on each rank, 1F1B."""
    rank, stages = get_rank(), get_world_size()
    counts = balanced(sizes, stages)
    before = sum(counts[:rank])
    with device:
        torch.manual_seed(0)
        few = GPT(**{**sizes, "layers": 1}, tied=False)
        parts: list[nn.Module] = [
            Layer(sizes["width"], sizes["heads"], 0.0) for _ in range(before, before + counts[rank])
        ]
    if rank == 0:
        parts.insert(0, First(few))
    if rank == stages - 1:
        parts += [few.norm, few.head]
    del few
    module = nn.Sequential(*parts)
    stage = PipelineStage(module, rank, stages, device)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=mean_loss)
    optimizer = optimizer_for(list(module.parameters()), device)

    def step(tokens: Tensor, following: Tensor) -> None:
        optimizer.zero_grad()
        with narrowed(device):
            if rank == 0:
                schedule.step(tokens, return_outputs=False)
            elif rank == stages - 1:
                schedule.step(target=following, return_outputs=False)
            else:
                schedule.step()
        optimizer.step()

    return step
