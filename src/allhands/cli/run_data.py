"""The data that a run file names, and how long a training with them is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands import models
from allhands.cli.named import located
from allhands.cli.own_objects import find, is_own
from allhands.config import RunFile
from allhands.data import catalogue
from allhands.errors import UserError, kind_of
from allhands.federated.strategy import Federated
from allhands.loop.schedule import length_of_training


def load_datasets(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The loaders' data sets; called in every worker, so that the parent holds no data."""
    if is_own(name):
        return _made_by(name, options)
    return {split: catalogue.load(name, split=split, **options) for split in ("train", "valid")}


def entry_of(run_file: RunFile) -> catalogue.Entry | None:
    """What the catalogue knows of the data; None for those that a function makes."""
    path = ("data", "name")
    if is_own(run_file.config.data.name):
        return None
    entry = located(run_file, path, lambda: catalogue.info(run_file.config.data.name))
    if is_text(entry):
        return _text(run_file, entry)
    return entry


def is_text(entry: catalogue.Entry | None) -> bool:
    """Whether its samples are tokens."""
    return entry is not None and len(entry.input_shape) == 1


def _text(run_file: RunFile, entry: catalogue.Entry) -> catalogue.Entry:
    """The entry for samples as long as the run file says; refuses what has no meaning for
    tokens."""
    given = run_file.config
    if is_federated(run_file):
        raise run_file.error(
            ("data", "name"),
            "tokens have no label by which clients could get them; name a function of your own "
            "that makes its data sets, package.module:function or file.py:function",
        )
    if given.model.name in models.names() and given.model.name != "gpt":
        problem = (
            f"the data set '{entry.name}' is tokens, which {given.model.name} does not take; "
            "write model.name: gpt"
        )
        raise run_file.error(("model", "name"), problem)
    if given.criterion.name == "cross_entropy":
        problem = (
            "it compares one prediction a sample, and here each token has one; write "
            "criterion: next_token"
        )
        raise run_file.error(("criterion", "name"), problem)
    if "accuracy" in [metric.name for metric in given.metrics or ()]:
        raise run_file.error(
            ("metrics",),
            "accuracy is of one prediction a sample, not of one a token; write metrics: []",
        )
    return catalogue.in_blocks(given.data.block) if given.data.block is not None else entry


def check_data(run_file: RunFile) -> None:
    """Raise `UserError` where the data of the catalogue, or the file with the function that makes
    them, are not there."""
    name = run_file.config.data.name
    options = data_options(run_file)
    if is_own(name):
        return
    few = {**options, "limit": 1}
    located(
        run_file,
        ("data",),
        lambda: [catalogue.load(name, split=split, **few) for split in ("train", "valid")],
    )


def data_options(run_file: RunFile) -> dict[str, Any]:
    """The arguments of what makes the data sets."""
    data = run_file.config.data
    if is_own(data.name):
        for key in ("limit", "normalize", "labels", "block"):
            if getattr(data, key) is not None:
                raise run_file.error(
                    ("data", key),
                    f"the catalogue's sets have it; write data.options.{key} for a function",
                )
        root = None if data.root is None else str(Path(data.root).expanduser().absolute())
        return located(run_file, ("data",), lambda: _options_of(data.name, root, data.options))
    if data.options:
        raise run_file.error(
            ("data", "options"),
            f"they are for a function, and '{data.name}' is in the catalogue; remove them",
        )
    wanted = run_file.config.data.model_dump(
        include={"root", "limit", "normalize", "labels", "block"}
    )
    if wanted["root"] is not None:
        wanted["root"] = str(Path(wanted["root"]).expanduser().absolute())
    options = {key: value for key, value in wanted.items() if value is not None}
    takes = ("root", "limit", *catalogue.info(run_file.config.data.name).options)
    for key in options:
        if key not in takes:
            name = run_file.config.data.name
            raise run_file.error(
                ("data", key),
                f"the data set '{name}' has no such option; set it to null. It takes: "
                f"{', '.join(takes)}",
            )
    return options


def length_of(run_file: RunFile, period: str, entry: catalogue.Entry | None, workers: int) -> int:
    """How often a scheduler of that period steps in the whole training with so many workers."""
    given = run_file.config
    if is_federated(run_file):  # schedules step once a round
        rounds: int = given.strategy.options.get(
            "rounds", inspect.signature(Federated).parameters["rounds"].default
        )
        return rounds
    epochs = 3 if given.check else given.num_epochs
    limit = 1 if given.overfit else 3 if given.check else math.inf
    whole = given.steps_per_epoch
    if whole is None and entry is not None:
        samples = min(entry.sizes["train"], given.data.limit or entry.sizes["train"])
        batch = given.data.batch_size * workers * given.accumulate
        whole = max(1, samples // batch if given.data.drop_last else -(-samples // batch))
    whole = None if whole is None else int(min(whole, limit))
    length = length_of_training(whole, epochs, given.max_steps)[period == "epoch"]
    if length is None:
        instead = "epoch" if period == "step" and given.max_steps is None else "step"
        raise run_file.error(
            ("data", "name"),
            "how many samples a function makes is known when it is called, and the length of "
            f"the training too; write scheduler.total_steps (or T_max), or period: {instead}",
        )
    return length


def is_federated(run_file: RunFile) -> bool:
    """Whether it trains by clients, in rounds."""
    return run_file.config.strategy.name.lower() == Federated.name


def _options_of(name: str, root: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the function is called with: ``data.root`` as `root`, where it takes that, and
    ``data.options``.
    """
    if root is not None and not Path(root).exists():
        raise UserError(
            f"data.root: there is no file or folder {root}; write where the data are, or make the "
            "folder where the function gets them itself"
        )
    takes = inspect.signature(find(name)).parameters
    anything = any(option.kind is option.VAR_KEYWORD for option in takes.values())
    given = dict(options)
    if "root" in given:
        raise UserError("data.options has a root; write data.root")
    if "root" in takes or anything:
        given["root"] = root
    elif root is not None:
        raise UserError(
            "data.root is set, and the function takes no root; give it that argument, or set "
            "data.root to null"
        )
    unknown = [] if anything else [key for key in given if key not in takes]
    if unknown:
        raise UserError(
            f"the function takes no {', '.join(unknown)}; it takes {', '.join(takes) or 'nothing'}"
        )
    missing = [
        key
        for key, option in takes.items()
        if option.default is option.empty
        and key not in given
        and option.kind in (option.POSITIONAL_OR_KEYWORD, option.KEYWORD_ONLY)
    ]
    if missing:
        raise UserError(
            f"the function needs {', '.join(missing)}; write data.options.{missing[0]}: …"
        )
    return given


def _made_by(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The data sets by loader. Raises `UserError` when the function returns anything else."""
    made = find(name)(**options)
    if not isinstance(made, Mapping) or not made:
        raise UserError(
            f"{name} returned {kind_of(made)}; it must return data sets by name, such as "
            "{'train': dataset, 'valid': dataset}"
        )
    return dict(made)
