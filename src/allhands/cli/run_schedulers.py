"""The learning-rate schedule that a run file names, with those inside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import lr_scheduler

from allhands.cli.named import Choice, among, is_kind
from allhands.cli.own_objects import is_own
from allhands.cli.run_data import is_federated, length_of
from allhands.cli.typed_options import arguments_of
from allhands.config import RunFile
from allhands.data import catalogue

# Arguments that are the length of the training, in the scheduler's own steps.
_LENGTHS = ("total_steps", "T_max")


def schedulers() -> dict[str, Any]:
    """Those of torch by name."""
    bases = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)
    return {name: kind for name, kind in vars(lr_scheduler).items() if is_kind(kind, bases)}


def scheduler_choice(run_file: RunFile) -> Choice:
    section = run_file.config.scheduler
    assert section is not None
    wanted = section.name
    return _a_scheduler(run_file, ("scheduler",), wanted, section.options)


def _a_scheduler(
    run_file: RunFile, path: tuple[str, ...], wanted: str, options: Mapping[str, Any]
) -> Choice:
    name, kind = among(run_file, (*path, "name"), wanted, schedulers(), "scheduler")
    own = {key: value for key, value in options.items() if key != "schedulers"}
    # Those in a list are made first, each of the same optimizer.
    leading = 0 if kind is lr_scheduler.ChainedScheduler else 1
    fills = ("schedulers", *_LENGTHS) if "schedulers" in options else _LENGTHS
    if "schedulers" not in arguments_of(kind) and "schedulers" in options:
        own = dict(options)
    return Choice(run_file, path, name, kind, own, leading, fills)


def scheduler_of(
    run_file: RunFile, optimizer: Any, entry: catalogue.Entry | None, workers: Callable[[], int]
) -> Any:
    """The scheduler and its period; None where the rate stays."""
    section = run_file.config.scheduler
    if section is None:
        return None
    chosen = scheduler_choice(run_file)
    if isinstance(optimizer, Mapping) and not is_own(section.name):
        raise run_file.error(
            ("scheduler", "name"),
            f"there are several optimizers ({', '.join(optimizer)}); name a function of yours that "
            "gets them and returns schedulers by name",
        )
    by_step = chosen.kind in (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
    period = section.period or ("step" if by_step and not is_federated(run_file) else "epoch")

    def length() -> int:
        return length_of(run_file, period, entry, workers())

    made = _make_scheduler(chosen, section.options, optimizer, length)
    return made if isinstance(made, Mapping) else (made, period)


def _make_scheduler(
    chosen: Choice, options: Mapping[str, Any], optimizer: Any, length: Callable[[], int]
) -> Any:
    run_file, path, takes = chosen.run_file, chosen.path, chosen.parameters
    filled: dict[str, Any] = {}
    if "epochs" not in options:  # OneCycleLR's other way of saying how long the training is
        filled = {key: length() for key in _LENGTHS if key in takes and key not in options}
    if "schedulers" in takes and "schedulers" in options:
        given = options["schedulers"]
        if not isinstance(given, list) or not given:
            raise run_file.error(
                (*path, "schedulers"), "it must be a list of schedulers, each a name or a section"
            )
        filled["schedulers"] = [
            _inner_scheduler(run_file, (*path, "schedulers", str(n)), one, optimizer, length)
            for n, one in enumerate(given)
        ]
    if chosen.kind is lr_scheduler.ChainedScheduler:
        return chosen.make(**filled)
    return chosen.make(optimizer, **filled)


def _inner_scheduler(
    run_file: RunFile, path: tuple[str, ...], given: Any, optimizer: Any, length: Callable[[], int]
) -> Any:
    section = {"name": given} if isinstance(given, str) else given
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise run_file.error(path, "it must be a name, or keys and values with a name")
    options = {key: value for key, value in section.items() if key != "name"}
    chosen = _a_scheduler(run_file, path, section["name"], options)
    return _make_scheduler(chosen, options, optimizer, length)
