"""`IRunner`: a runner whose methods give what it trains with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allhands.catalyst.own_runner import Runner
from allhands.errors import UserError
from allhands.report.history import History

# Methods of older versions of Catalyst's, and what to write.
_OLDER = {
    "get_datasets": "get_loaders(self)",
    "get_transforms": "get_loaders(self)",
    "get_stage_len": "num_epochs",
    "stages": "a training for each stage",
    "hparams": "train(…), which writes its settings",
}


class IRunner(Runner):
    """Trains with what its methods give::

        class Own(dl.IRunner):
            num_epochs = 3

            def get_loaders(self): …
            def get_model(self): …
            def get_optimizer(self, model): …
            def handle_batch(self, batch): …

        Own().run()

    `num_epochs`, `seed` and `logdir` may be attributes or properties; the rest is `Runner`'s.
    """

    num_epochs: int | None = 1
    seed = 42
    logdir: Any = None
    own_methods = True

    def get_engine(self) -> Any:
        """One of `dl.CPUEngine` and its kin; None takes a GPU where there is one."""
        return None

    def get_loggers(self) -> Mapping[str, Any]:
        """`dl.CSVLogger` and its kin, by name."""
        return {}

    def get_loaders(self) -> Mapping[str, Any]:
        """The loaders by name."""
        raise UserError(
            f"{type(self).__name__} has no data; write def get_loaders(self), which returns "
            '{"train": loader, "valid": loader}'
        )

    def get_model(self) -> Any:
        """The model, or a dict of them."""
        if self.model is None:
            raise UserError(f"{type(self).__name__} has no model; write def get_model(self)")
        return self.model

    def get_criterion(self) -> Any:
        """The criterion, or a dict of them."""
        return None

    def get_optimizer(self, model: Any) -> Any:
        """The optimizer of the model, or a dict of them."""
        return None

    def get_scheduler(self, optimizer: Any) -> Any:
        """The scheduler of the optimizer, or a dict of them."""
        return None

    def get_callbacks(self) -> Mapping[str, Any]:
        """The callbacks by name."""
        return {}

    def run(self) -> History:
        """Train; returns the history.

        Raises:
            UserError: a method is missing, or gives what cannot be honoured.
        """
        older = [name for name in _OLDER if hasattr(type(self), name)]
        if older:
            raise UserError(
                f"{type(self).__name__}.{older[0]} would never be called; write {_OLDER[older[0]]}"
            )
        self.model = model = self.get_model()
        self.criterion = criterion = self.get_criterion()
        self.optimizer = optimizer = self.get_optimizer(model)
        self.scheduler = scheduler = self.get_scheduler(optimizer)
        given = {
            "model": model,
            "criterion": criterion,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loggers": self.get_loggers(),
            "engine": self.get_engine(),
            "logdir": self.logdir,
        }
        return self.train(
            loaders=self.get_loaders(),
            callbacks=self.get_callbacks(),
            num_epochs=self.num_epochs,
            seed=self.seed,
            **{name: value for name, value in given.items() if value is not None},
        )
