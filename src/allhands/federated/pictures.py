"""Who has what, as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from allhands.federated.clients import Clients
from allhands.report import new_figure, save_figure

_EACH = 60  # clients that have a column of their own; more are shown as histograms


def class_counts(
    clients: Clients, targets: torch.Tensor | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How many samples of each class every client has.

    Args:
        clients: who holds which samples.
        targets: class of each sample: integers, shape ``[samples]``.

    Returns:
        Counts, int64, shape ``[clients, classes]``, and the classes.
    """
    known, place = np.unique(np.asarray(targets), return_inverse=True)
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    counts = np.zeros((len(clients), len(known)), dtype=np.int64)
    np.add.at(counts, (owner, place[clients.indices.numpy()]), 1)
    return counts, known


def picture(clients: Clients, targets: torch.Tensor | np.ndarray | None, path: str | Path) -> None:
    """Draw a partition: classes by clients as shades, and how many samples each client has; for
    many clients, how sizes and numbers of classes are spread.

    Args:
        clients: who holds which samples.
        targets: class of each sample, shape ``[samples]``; None: only sizes are drawn.
        path: of the picture; its ending says the format (png, svg, pdf).

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(12 if targets is not None else 6, 4)
    counts, known = class_counts(clients, targets) if targets is not None else (None, np.zeros(0))
    axes = figure.subplots(1, 2 if counts is not None else 1, squeeze=False)[0]
    names = clients.names or [str(i) for i in range(len(clients))]
    if len(clients) <= _EACH:
        axes[0].bar(range(len(clients)), clients.sizes)
        axes[0].set(
            xlabel="client",
            ylabel="samples",
            title=f"{len(clients)} clients, {clients.sizes.sum():,} samples",
        )
        axes[0].set_xticks(range(len(clients)), names, rotation=90, fontsize=6)
    else:
        axes[0].hist(clients.sizes, bins=40)
        axes[0].set(
            xlabel="samples of a client",
            ylabel="clients",
            title=f"{len(clients):,} clients, "
            f"{clients.sizes.min():,} to {clients.sizes.max():,} samples",
        )
    if counts is not None and len(clients) <= _EACH:
        shown = axes[1].imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest")
        axes[1].set(xlabel="client", ylabel="class", title="samples by class")
        axes[1].set_yticks(range(len(known)), [str(label) for label in known], fontsize=6)
        figure.colorbar(shown, ax=axes[1])
    elif counts is not None:
        axes[1].hist((counts > 0).sum(1), bins=np.arange(len(known) + 2) - 0.5)
        axes[1].set(
            xlabel="classes of a client", ylabel="clients", title=f"of {len(known)} classes"
        )
    save_figure(figure, path)
