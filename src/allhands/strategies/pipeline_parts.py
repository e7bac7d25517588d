"""A model as a chain of parts, and where to cut it so that the slowest stage is as fast as
possible."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from allhands.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Part:
    """One link of the chain.

    Attributes:
        name: by which a stage that begins here is named.
        uses: names of the submodules, parameters and buffers that it uses.
        run: ``(model, value) -> value``; `model` needs to hold only what the part uses, under its
            own names.
    """

    name: str
    uses: tuple[str, ...]
    run: Callable[[nn.Module, Any], Any]


def chain_of(model: nn.Module) -> list[Part]:
    """The parts whose results are fed from one to the next when the model is called.

    They are what the model's method ``chain()`` says, the modules of an ``nn.Sequential`` (those of
    nested ones too), or what ``torch.fx`` finds in a ``forward`` that calls the model's children
    one after another, with functions between them.

    Raises:
        UserError: the forward is not such a chain, or has hooks that a stage would not call.
    """
    for name, module in model.named_modules():
        if module is model or type(module) is nn.Sequential:
            _refuse_hooks(model, name, module)
    if callable(getattr(model, "chain", None)):
        return [_said(model, link) for link in model.chain()]  # type: ignore[operator]
    if type(model) is nn.Sequential:
        return [_module_part(name) for name in _in_sequential(model, "")]
    return _trace(model)


def _refuse_hooks(model: nn.Module, name: str, module: nn.Module) -> None:
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        where = f"'{name}' of the {type(model).__name__}" if name else f"the {type(model).__name__}"
        raise UserError(
            f"{where} has hooks, which a pipeline would not call, since it runs what is inside one "
            "by one. Remove the hooks, or register them on the modules inside"
        )


def _in_sequential(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if type(child) is nn.Sequential and len(child):
            yield from _in_sequential(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def _module_part(name: str) -> Part:
    return Part(name, (name,), lambda model, value: model.get_submodule(name)(value))


def _said(model: nn.Module, link: str | tuple[str, Sequence[str]]) -> Part:
    if isinstance(link, str):
        try:
            model.get_submodule(link)
        except AttributeError:
            raise UserError(
                f"{type(model).__name__}.chain() names '{link}', which is no submodule of it"
            ) from None
        return _module_part(link)
    method, uses = link
    if not callable(getattr(model, method, None)):
        raise UserError(
            f"{type(model).__name__}.chain() names '{method}', which is no method of it"
        )
    return Part(method, tuple(uses), lambda model, value: getattr(model, method)(value))


# ------------------------------------------------------------------ a chain found by tracing


class _Tracer(fx.Tracer):
    """Looks into the model's own forward and into nn.Sequential, and at nothing below."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) is not nn.Sequential


def _trace(model: nn.Module) -> list[Part]:
    kind = type(model).__name__
    arguments = inspect.signature(model.forward).parameters.values()
    needed = [
        a
        for a in arguments
        if a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)
    ]
    given = {a.name: a.default for a in arguments if a.default is not a.empty}
    if len(needed) != 1 or any(a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments):
        raise _no_chain(
            kind,
            f"it takes {', '.join(a.name for a in arguments) or 'no argument'}, and a chain takes "
            "one input",
        )
    graphs = []
    for mode in (True, False):
        with _in_mode(model, mode):
            try:
                graphs.append(_Tracer().trace(model, concrete_args=given or None))
            except Exception as error:  # whatever the model does with a proxy
                raise _no_chain(kind, f"torch.fx says: {str(error).splitlines()[0]}") from None
    graph, evaluated = graphs
    if str(graph) != str(evaluated):
        raise _no_chain(
            kind,
            "it does something else in training than in evaluation (use nn.Dropout, not F.dropout)",
        )
    # Arguments with a default are taken to have it; what is left of them are assertions that it is
    # so.
    left_out = {node for node in graph.nodes if node.op == "placeholder"} - {
        next(iter(graph.nodes))
    }
    left_out |= {user for node in left_out for user in node.users}
    return _segments([node for node in graph.nodes if node not in left_out])


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def _no_chain(kind: str, why: str) -> UserError:
    return UserError(
        f"a pipeline needs a model whose forward is a chain of its children, and that of {kind} is "
        f"not seen to be one: {why}. Build it as an nn.Sequential, or give {kind} a method chain() "
        "that returns the names of its submodules in the order in which forward calls them; for "
        "what is not one submodule, a pair (name of a method, names of what it uses). Or use "
        "distributed='fsdp', which takes any model"
    )


def _segments(nodes: list[fx.Node]) -> list[Part]:
    """The graph cut before each module call at which only one value is handed on."""
    place = {node: number for number, node in enumerate(nodes)}
    last_use = {
        node: max((place[user] for user in node.users if user in place), default=-1)
        for node in nodes
    }
    starts = [1]
    for number in range(2, len(nodes)):
        live = [node for node in nodes[:number] if last_use[node] >= number]
        begun = any(node.op == "call_module" for node in nodes[starts[-1] : number])
        if nodes[number].op == "call_module" and len(live) == 1 and begun:
            starts.append(number)
    parts: list[Part] = []
    for start, stop in itertools.pairwise([*starts, len(nodes)]):
        inside = nodes[start:stop]
        taken = next(node for node in reversed(nodes[:start]) if last_use[node] >= start)
        given = next(
            node
            for node in reversed(inside)
            if node.op != "output" and (last_use[node] >= stop or stop == len(nodes))
        )
        uses = dict.fromkeys(
            str(node.target) for node in inside if node.op in ("call_module", "get_attr")
        )
        name = next(
            (str(node.target) for node in inside if node.op == "call_module"), inside[0].name
        )
        # A module that is called a second time.
        again = sum(part.uses[:1] == (name,) for part in parts)
        parts.append(
            Part(
                f"{name}:{again + 1}" if again else name,
                tuple(uses),
                _Segment(inside, taken, given),
            )
        )
    return parts


class _Segment:
    def __init__(self, nodes: list[fx.Node], taken: fx.Node, given: fx.Node) -> None:
        self.nodes, self.taken, self.given = nodes, taken, given

    def __call__(self, model: nn.Module, value: Any) -> Any:
        values: dict[fx.Node, Any] = {self.taken: value}
        for node in self.nodes:
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            if node.op == "output":
                return args[0]
            if node.op == "call_module":
                values[node] = model.get_submodule(str(node.target))(*args, **kwargs)
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            elif node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                owner, _, attribute = str(node.target).rpartition(".")
                values[node] = getattr(model.get_submodule(owner), attribute)
        return values[self.given]


# ------------------------------------------------------------------ where to cut


def cut(
    parts: list[Part],
    num_stages: int,
    stages: Any,
    costs: Callable[[], Sequence[float]],
    model: nn.Module,
) -> list[list[Part]]:
    """The parts of each stage.

    Args:
        parts: the chain.
        num_stages: how many stages; each gets at least one part.
        stages: "auto", the names of the parts at which the second and later stages begin, or a
            function ``(model, num_stages)`` that gives those names.
        costs: called for "auto": what each part costs; see `balanced`.
        model: what a function is given.

    Raises:
        UserError: more stages than parts, or names that do not fit.
    """
    if len(parts) < num_stages:
        raise UserError(
            f"a pipeline of {num_stages} stages needs at least as many parts, and the "
            f"{type(model).__name__} is a chain of "
            f"{len(parts)}: {', '.join(part.name for part in parts)}. Use at most {len(parts)} "
            "stages, or a deeper model"
        )
    if stages == "auto":
        sizes = balanced(list(costs()), num_stages)
        bounds = list(itertools.accumulate(sizes, initial=0))
    else:
        names = list(stages(model, num_stages)) if callable(stages) else list(stages)
        bounds = [0, *_places(parts, names, num_stages, type(model).__name__), len(parts)]
    return [parts[start:stop] for start, stop in itertools.pairwise(bounds)]


def _places(parts: list[Part], names: list[str], num_stages: int, kind: str) -> list[int]:
    if len(names) != num_stages - 1:
        raise UserError(
            f"stages={names} names the beginning of {len(names)} stages after the first, and there "
            f"are {num_stages} stages: name {num_stages - 1}, or write stages='auto'"
        )
    known = [part.name for part in parts]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(
                f"stages={names}: no part of the {kind} is named '{name}'{hint} Its parts are "
                f"{', '.join(known)}"
            )
    places = [known.index(name) for name in names]
    if places != sorted(set(places)) or (places and places[0] == 0):
        raise UserError(
            f"stages={names} must name parts in their order, none twice and not the first, out of "
            f"{', '.join(known)}"
        )
    return places


def balanced(costs: list[float], num_stages: int) -> list[int]:
    """How many consecutive parts each stage gets, so that the most expensive stage is as cheap as
    possible.

    Dynamic programming over the prefixes of the chain, in ``len(costs) ** 2 * num_stages`` steps.
    """
    total = list(itertools.accumulate(costs, initial=0.0))
    count = len(costs)
    # best[n]: the most expensive stage of the best cut of the first n parts, and the cut; stage by
    # stage.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(1, num_stages + 1):
        found: dict[int, tuple[float, list[int]]] = {}
        for stop in range(stage, count - (num_stages - stage) + 1):
            found[stop] = min(
                (max(worst, total[stop] - total[start]), [*sizes, stop - start])
                for start, (worst, sizes) in best.items()
                if start < stop
            )
        best = found
    return best[count][1]


# ------------------------------------------------------------------ a stage's part of the model


def pruned(model: nn.Module, uses: Sequence[str]) -> nn.Module:
    """A module of the class of `model` that holds only what is named, under the same names, and
    shares it with `model`.

    The modules on the way to what is named are lists, which nobody calls.
    """
    kept = copy.copy(model)
    # A copy shares the dicts of hooks, and what is registered on one stage must not be called on
    # another.
    kept.__dict__.update(
        {key: copy.copy(value) for key, value in model.__dict__.items() if isinstance(value, dict)}
    )
    _fill(kept, model, "", set(uses))
    return kept


def _fill(kept: nn.Module, module: nn.Module, prefix: str, uses: set[str]) -> None:
    for store in ("_parameters", "_buffers"):
        kept.__dict__[store] = {
            n: value for n, value in module.__dict__[store].items() if prefix + n in uses
        }
    kept.__dict__["_modules"] = {}
    for name, child in module._modules.items():
        if prefix + name in uses or child is None:
            kept._modules[name] = child
        elif child is not None and any(use.startswith(f"{prefix}{name}.") for use in uses):
            between = nn.ModuleList()
            between.training = child.training
            kept._modules[name] = between
            _fill(between, child, f"{prefix}{name}.", uses)
