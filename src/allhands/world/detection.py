"""Which environment started this process. Imports no torch: the launcher and the command line ask
before they need it.
"""

from __future__ import annotations

import os

from allhands.errors import UserError, WorldError
from allhands.world.environments import ENVIRONMENTS, Environment
from allhands.world.layout import Environ, Layout, read_int


def detected_environment(environ: Environ) -> Environment | None:
    """The first environment that started this process; None when none did. Never raises."""
    return next(
        (environment for environment in ENVIRONMENTS if environment.detected(environ)), None
    )


def find_environment(environ: Environ) -> Environment | None:
    """The first environment that started this process; None for a process that was started alone.

    Raises `UserError` when RANK or WORLD_SIZE is set without the other and nothing else explains
    it.
    """
    environment = detected_environment(environ)
    if environment is not None:
        return environment
    rank, size = read_int(environ, "RANK"), read_int(environ, "WORLD_SIZE")
    if (rank or 0) > 0 or (size or 1) > 1:
        have, lack = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
        raise UserError(
            f"{have}={environ[have]} is set but {lack} is not: set both, or unset {have} to train "
            "alone."
        )
    return None


def detect(environ: Environ | None = None) -> Layout | None:
    """The layout of the world of *more than one* process around this one; None when it is alone.

    Reads only `environ` (default: `os.environ`), opens nothing and imports no torch. Raises what
    `init` raises for variables that cannot be read or contradict one another.
    """
    environ = os.environ if environ is None else environ
    environment = find_environment(environ)
    if environment is None:
        return None
    layout = environment.layout(environ)
    return layout if layout.world_size > 1 else None


def explicit_layout(
    environ: Environ,
    rank: int,
    world_size: int,
    local_rank: int | None,
    local_world_size: int | None,
) -> Layout:
    """The layout that was passed to `init`; `WorldError` when torchrun's variables say
    otherwise."""
    for name, passed in (("RANK", rank), ("WORLD_SIZE", world_size)):
        told = read_int(environ, name)
        if told is not None and told != passed:
            raise WorldError(
                f"init(..., {name.lower()}={passed}) contradicts {name}={told} in the environment: "
                f"leave the argument out, or unset {name}."
            )
    return Layout(rank, world_size, local_rank, local_world_size, environment="explicit")
