"""Milliseconds a step of models that nobody here wrote, on one GPU: by hand, and by each `step=`.

    python benchmarks/library_models.py
    python benchmarks/library_models.py --device cpu --tiny --out tiny   # that it works, on a CPU

BERT-base at 32 x 128 tokens and GPT-2 (124M) at 16 x 1,024 from transformers, ResNet-50 and a
ViT-S/16 at 64 x 224 x 224 from torchvision (left out where that is not installed), all in bf16 by
autocast, with weights drawn at random and AdamW. Batches lie on the GPU, also for the loops by
hand, so that what is measured is computing and not feeding. A figure is the median of the last 20
steps; under `step="auto"`, which decides after 40 steps and looks at the result after 80, of the
last of 120. `bf16-true` is `step="compile"` with `precision="bf16-true"`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import machine, save_json
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from allhands import Callback, SupervisedRunner
from allhands.models.transformer import NextToken

STEPS, COUNTED = 60, 20


class Logits(nn.Module):
    """A model of transformers, called as its tutorials do: with a mask."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits


def bert(tiny: bool) -> tuple[nn.Module, Any, Any, int]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2} if tiny else {}
    config = BertConfig(num_labels=2, intermediate_size=64 if tiny else 3072, **sizes)
    rows = 4 if tiny else 32
    tokens = torch.randint(1000, 30_000, (rows * STEPS, 128))
    return (
        Logits(BertForSequenceClassification(config)),
        nn.CrossEntropyLoss(),
        TensorDataset(tokens, torch.randint(2, (len(tokens),))),
        rows,
    )


def gpt2(tiny: bool) -> tuple[nn.Module, Any, Any, int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2} if tiny else {}
    rows, length = (2, 16) if tiny else (16, 1024)
    tokens = torch.randint(50_000, (rows * STEPS, length + 1))
    return (
        Logits(GPT2LMHeadModel(GPT2Config(**sizes))),
        NextToken(),
        TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        rows,
    )


def resnet50(tiny: bool) -> tuple[nn.Module, Any, Any, int]:
    from torchvision.models import resnet50 as made

    return of_images(made().to(memory_format=torch.channels_last), tiny)


def vit(tiny: bool) -> tuple[nn.Module, Any, Any, int]:
    from torchvision.models import VisionTransformer

    layers, side = (1, 32) if tiny else (12, 224)
    return of_images(VisionTransformer(side, 16, layers, 6, 384, 1536), tiny)


def of_images(model: nn.Module, tiny: bool) -> tuple[nn.Module, Any, Any, int]:
    rows, side = (2, 32) if tiny else (64, 224)
    images = torch.randn(rows * (STEPS if tiny else 8), 3, side, side)
    data = TensorDataset(images, torch.randint(1000, (len(images),)))
    return model, nn.CrossEntropyLoss(), data, rows


TASKS = {"bert": bert, "resnet50": resnet50, "vit-s": vit, "gpt2": gpt2}


class Clock(Callback):
    """The seconds between the ends of steps; the device is not waited for until the end."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.steps, self.marks = device, steps, []

    def on_step_end(self, training: Any) -> None:
        if self.device.type == "cuda":
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self.marks.append(mark)
        if training is not None and len(self.marks) == self.steps:
            training.stop("measured", now=True)

    def milliseconds(self) -> float:
        if self.device.type != "cuda":
            gaps = [(b - a) * 1000 for a, b in zip(self.marks, self.marks[1:], strict=False)]
        else:
            torch.cuda.synchronize()
            gaps = [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return statistics.median(gaps[-COUNTED:])


def by_hand(task: str, tiny: bool, device: torch.device, compiled: bool) -> dict[str, Any]:
    model, criterion, data, rows = parts(task, tiny, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    call: Any = torch.compile(model) if compiled else model
    inputs, targets = (tensor.to(device) for tensor in data.tensors)
    clock = Clock(device, STEPS)
    for number in range(STEPS):
        at = slice(number * rows % len(inputs), number * rows % len(inputs) + rows)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = criterion(call(inputs[at]), targets[at])
        loss.backward()
        optimizer.step()
        clock.on_step_end(None)
    return {"milliseconds": clock.milliseconds()}


def ours(
    task: str, tiny: bool, device: torch.device, step: str, precision: str = "bf16"
) -> dict[str, Any]:
    model, criterion, data, rows = parts(task, tiny, device)
    steps = 2 * STEPS if step == "auto" else STEPS
    clock, said = Clock(device, steps), io.StringIO()
    with contextlib.redirect_stdout(said):
        SupervisedRunner(device=device.type).train(
            model=model,
            criterion=criterion,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
            loaders={"train": DataLoader(data, rows)},
            num_epochs=10_000,  # a long training, of which the first steps are measured
            step=step,
            precision=precision,
            callbacks=[clock],
        )
    lines = [line for line in said.getvalue().splitlines() if line.startswith("step:")]
    return {"milliseconds": clock.milliseconds(), "said": lines}


def parts(task: str, tiny: bool, device: torch.device) -> tuple[nn.Module, Any, Any, int]:
    torch.manual_seed(0)
    model, criterion, data, rows = TASKS[task](tiny)
    return model.to(device), criterion, data, rows


CONTENDERS: dict[str, Callable[..., dict[str, Any]]] = {
    "by hand": lambda *given: by_hand(*given, compiled=False),
    "by hand, compiled": lambda *given: by_hand(*given, compiled=True),
    "graph": lambda *given: ours(*given, step="graph"),
    "compile": lambda *given: ours(*given, step="compile"),
    "auto": lambda *given: ours(*given, step="auto"),
    "bf16-true": lambda *given: ours(*given, step="compile", precision="bf16-true"),
}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--tiny", action="store_true")
    asked.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    asked.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    asked.add_argument("--out", default="library_models")
    given = asked.parse_args()
    device, rows = torch.device(given.device), []
    torch.set_float32_matmul_precision("high")
    for task in given.tasks:
        for name in given.contenders:
            began = time.perf_counter()
            try:
                found = CONTENDERS[name](task, given.tiny, device)
            except Exception as error:  # one that cannot is left out, and the file says why
                found = {"failed": f"{type(error).__name__}: {error}"[:500]}
            found |= {"task": task, "contender": name, "seconds": time.perf_counter() - began}
            rows.append(found)
            print(found, flush=True)
            save_json(given.out, {"machine": machine(), "rows": rows})
            torch._dynamo.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
