"""The strategy that a run file names, alone or with others on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allhands.cli.named import Choice, choice, choose, located
from allhands.config import RunFile
from allhands.strategies import DDP, FSDP, Mesh, Pipeline, Strategy, Tensor

PARTS = {cls.name: cls for cls in (FSDP, Tensor, Pipeline)}


def strategy_of(run_file: RunFile, known: Mapping[str, Any]) -> Strategy:
    """The strategy, from the sections `strategy` and `mesh`.

    Raises:
        UserError: a name or option that does not exist, or that has no effect here; says where it
            was written.
    """
    mesh, options = run_file.config.mesh, run_file.config.strategy.options
    written = [key for key in PARTS if key in options]
    name = choose(run_file, "strategy", known)[0]
    if mesh is None:
        if name in PARTS and written:
            axis = {"fsdp": "dp", "tensor": "tp", "pipeline": "pp"}[written[0]]
            raise run_file.error(
                ("strategy", written[0]),
                f"it has an effect on a mesh only; write mesh: {{{axis}: 2, …}}, or remove it",
            )
        made: Strategy = choice(run_file, "strategy", known, by_type=False).make()
        return made
    if name not in PARTS and name != DDP.name:
        raise run_file.error(
            ("mesh",),
            f"the strategy {name} has no mesh; remove it, or set strategy.name to ddp or fsdp",
        )
    own = {key: value for key, value in options.items() if key not in PARTS}
    if name == DDP.name and own:
        raise run_file.error(
            ("strategy", next(iter(own))),
            "on a mesh, copies of the model have no settings; remove it, or set mesh to null",
        )
    if name in written:
        raise run_file.error(
            ("strategy", name),
            f"the settings of {name} stand beside its name already; remove this section",
        )
    parts: dict[str, Any] = {key: _part(run_file, key) for key in written}
    if name in PARTS:
        chosen = Choice(run_file, ("strategy",), name, PARTS[name], own, by_type=False)
        parts[name] = chosen.make()
    together: Strategy = located(
        run_file, ("mesh",), lambda: Mesh(mesh.pp, mesh.dp, mesh.tp, **parts)
    )
    return together


def _part(run_file: RunFile, key: str) -> Strategy:
    options = run_file.config.strategy.options[key]
    if not isinstance(options, Mapping):
        raise run_file.error(
            ("strategy", key), "it must be keys and values, the settings of that part, such as {}"
        )
    chosen = Choice(run_file, ("strategy", key), key, PARTS[key], options, by_type=False)
    made: Strategy = chosen.make()
    return made
