"""Layers that are not trained for some epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from allhands.checks import check_whole
from allhands.errors import UserError, did_you_mean
from allhands.runner.callbacks import Callback

if TYPE_CHECKING:
    from allhands.runner.training import Training


class Freeze(Callback):
    """Leave layers as they are: all the time, or in the first epochs.

    Their parameters take no part in the backward pass and are not updated. The optimizer may have
    them; what they have of its state stays. BatchNorm in them goes on counting its running
    statistics in training, which layers in evaluation mode do not. A pipeline cannot take layers up
    between two epochs, and says so.

    Args:
        names: of modules or parameters, as in ``model.named_modules()``: "backbone",
            "layers.0.weight".
        epochs: after which they are trained; None leaves them frozen.

    Raises:
        UserError: no name, or `epochs` is no whole number; as the training begins, a name that the
            model does not have, or nothing that would be trained.
    """

    def __init__(self, *names: str, epochs: int | None = None) -> None:
        if not names or not all(isinstance(name, str) and name for name in names):
            raise UserError(
                f"Freeze{names!r}: name layers of the model, such as Freeze('backbone')"
            )
        if epochs is not None:
            check_whole("epochs", epochs, of="Freeze")
        self.names, self.epochs = names, epochs
        self._frozen: set[str] = set()

    def on_train_start(self, training: Training) -> None:
        model = training.model
        for name in self.names:
            if not _within(model, name):
                known = [
                    key for key, _ in (*model.named_modules(), *model.named_parameters()) if key
                ]
                raise UserError(
                    f"Freeze({name!r}): the model has no such layer{did_you_mean(name, known)}"
                )
        self._follow(training)

    def on_epoch_start(self, training: Training) -> None:
        self._follow(training)

    def on_train_end(self, training: Training) -> None:
        self._set(training.model, True)

    def _follow(self, training: Training) -> None:
        freeze = self.epochs is None or training.epoch < self.epochs
        self._set(training.model, not freeze)

    def _set(self, model: nn.Module, trained: bool) -> None:
        inside = {key: p for name in self.names for key, p in _within(model, name).items()}
        if not trained:
            self._frozen |= {key for key, p in inside.items() if p.requires_grad}
        for key in self._frozen & inside.keys():
            inside[key].requires_grad_(trained)
        if not trained and not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"Freeze{self.names!r}: nothing of the model would be trained")


def _within(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    return {
        key: parameter
        for key, parameter in model.named_parameters()
        if key == name or key.startswith(f"{name}.")
    }
