"""A small GPT by steps: warm-up, clipping, evaluation and checkpoints every so many steps.

python gpt.py
allhands launch -n 2 gpt.py --text input.txt
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import allhands
from allhands.models import GPT

PAGES = Path(__file__).parents[2] / "docs"  # what is read unless a text is given


def blocks(text: str, length: int) -> tuple[TensorDataset, TensorDataset, int]:
    """Blocks of characters and of the characters that follow them, to train on and to evaluate,
    and how many different characters there are."""
    characters = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([characters[character] for character in text])
    number = (len(tokens) - 1) // length
    x, y = (part[: number * length].view(number, length) for part in (tokens[:-1], tokens[1:]))
    cut = number * 9 // 10
    return TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:]), len(characters)


def train(data, valid, vocabulary, batch_size=16, steps=1000, warmup=100, every=250, **options):
    """Train on blocks of tokens. `batch_size` is that of one worker."""
    torch.manual_seed(0)
    length = data.tensors[0].shape[1]
    model = GPT(vocabulary, length, layers=2, heads=2, width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def rate(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    loop = allhands.Loop(
        model=model,
        optimizer=optimizer,
        scheduler=(LambdaLR(optimizer, rate), "step"),
        loaders={
            "train": DataLoader(data, batch_size=batch_size, shuffle=True),
            "valid": DataLoader(valid, batch_size=batch_size),
        },
        clip_norm=1.0,
        **options,
    )

    def loss_of(batch):
        x, y = batch
        return F.cross_entropy(loop.model(x).flatten(0, 1), y.flatten())

    for step in loop.steps(steps):
        loop.step(loss_of, step.batch)
        if step.every(every):
            step.evaluate("valid", loss_of)
            step.log(**step.train())
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, help="a text file; else the pages of this repository")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=250, help="steps from evaluation to the next")
    parser.add_argument("--limit", type=int, help="use only the first so many characters")
    parser.add_argument("--logdir", help="folder for checkpoints, from which the training goes on")
    parser.add_argument("--strategy")
    args = parser.parse_args()
    files = [args.text] if args.text else sorted(PAGES.glob("*.md"))
    text = "".join(file.read_text() for file in files)[: args.limit]
    options = {"logdir": args.logdir, "save_every": args.every, "resume": "auto"}
    train(
        *blocks(text, length=64),
        steps=args.steps,
        every=args.every,
        strategy=args.strategy,
        **(options if args.logdir else {}),
    )
