"""Which modules of a model are its layers: what is sharded, compiled or computed again as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from allhands.errors import UserError, did_you_mean

#: Modules that hold others and are never called themselves.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def layers(model: nn.Module, prefix: str = "") -> Iterable[tuple[str, nn.Module]]:
    """The children with parameters of the outermost lists and sequences of layers."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        in_list = isinstance(model, (nn.ModuleList, nn.Sequential))
        if in_list and not isinstance(child, CONTAINERS) and has_parameters(child):
            yield path, child
        else:
            yield from layers(child, f"{path}.")


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those of `layers` that have parts."""
    return [
        (name, module)
        for name, module in layers(model)
        if next(module.children(), None) is not None
    ]


def named(model: nn.Module, wanted: Sequence[str], option: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters that have one of these names, or are of a class that has.

    Args:
        model: whose modules; it is not among them itself.
        wanted: names of classes or of modules.
        option: what the user has written them in.

    Raises:
        UserError: there is nothing of such a name, or it is never called.
    """
    modules = {name: module for name, module in model.named_modules() if module is not model}
    classes = {type(module).__name__ for module in modules.values()}
    for name in wanted:
        if name not in modules and name not in classes:
            hint = did_you_mean(name, [*classes, *modules])
            raise UserError(
                f"{option} names '{name}', and the model has no module and no class of that "
                f"name{hint} Its classes are: {', '.join(sorted(classes))}"
            )
    for name, module in modules.items():
        if (name in wanted or type(module).__name__ in wanted) and has_parameters(module):
            if isinstance(module, CONTAINERS):
                raise UserError(
                    f"{option} names '{name}', a {type(module).__name__}, which is never called; "
                    "name its members"
                )
            yield name, module


def has_parameters(module: nn.Module) -> bool:
    """Whether it, or a module inside it, has any."""
    return next(module.parameters(), None) is not None
