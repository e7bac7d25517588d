"""Which module is split over the workers of a tensor-parallel group, and how: from patterns of
names to styles."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from allhands.checks import check_whole
from allhands.errors import UserError, did_you_mean
from allhands.models.images import MLP
from allhands.models.transformer import GPT, Attention

#: What a style makes of a module; each but the last two is for modules with a weight to split.
STYLES = ("colwise", "rowwise", "vocab", "sequence", "replicate")
# Names under which models keep several projections in one weight, one after another.
_FUSED_NAMES = ("qkv", "kv", "c_attn", "in_proj", "query_key_value", "gate_up")


@dataclass(frozen=True)
class Style:
    """How one module is split.

    Attributes:
        kind: one of `STYLES`.
        parts: of a colwise module, equal parts that lie one after another in its output (q, k and
            v), each of which is split.
        heads: of a colwise module, the attention heads in each part, none of which may be cut; None
            where it has none.
    """

    kind: str
    parts: int = 1
    heads: int | None = None

    def dim_of(self, parameter: str) -> int | None:
        """The dimension along which a parameter is split; None where each worker has all of it."""
        if self.kind in ("colwise", "vocab"):
            return 0
        return 1 if self.kind == "rowwise" and parameter == "weight" else None


def check_plan(plan: Any) -> None:
    """Raise `UserError` for a plan that no model could be split by."""
    if plan is None or isinstance(plan, str):
        if plan is not None and plan not in PLANS:
            raise UserError(
                f"Tensor(plan={plan!r}): there is no such plan{did_you_mean(plan, PLANS)} "
                f"Known are {', '.join(PLANS)}; or write one, such as "
                "{'layers.*.mlp.up': 'colwise', 'layers.*.mlp.down': 'rowwise'}"
            )
        return
    if not isinstance(plan, Mapping) or not plan:
        raise UserError(
            f"Tensor(plan={plan!r}); it must be a name ({', '.join(PLANS)}) or patterns of module "
            "names with their "
            "styles, such as {'layers.*.mlp.up': 'colwise', 'layers.*.mlp.down': 'rowwise'}"
        )
    for pattern, given in plan.items():
        _style(pattern, given)


def resolve(
    model: nn.Module, plan: Any, tp: int, sequence_parallel: bool, loss_parallel: bool
) -> dict[str, Style]:
    """The style of each module that the plan names, by the module's name.

    Args:
        model: the whole model, before anything of it is split.
        plan: None, a name of `PLANS`, or patterns of names with styles.
        tp: workers in a tensor-parallel group.
        sequence_parallel: whether modules may be "sequence".
        loss_parallel: whether a "vocab" Linear leaves its outputs split.

    Raises:
        UserError: no plan is known for the model; a pattern matches nothing; a style that the
            module cannot have; a dimension or a number of heads that `tp` does not divide.
    """
    check_plan(plan)
    if plan is None:
        plan = next((name for name, (kind, _) in PLANS.items() if isinstance(model, kind)), None)
        if plan is None:
            raise UserError(
                f"Tensor() has no plan for a {type(model).__name__}; write one, such as "
                f"Tensor(plan={{{_example(model)}}})"
            )
    if isinstance(plan, str):
        kind, make = PLANS[plan]
        if not isinstance(model, kind):
            raise UserError(
                f"Tensor(plan={plan!r}) is for allhands.models.{kind.__name__}, and the model is a "
                f"{type(model).__name__}; write a plan, such as {{{_example(model)}}}"
            )
        plan = make(model, sequence_parallel)
    styles = _match(model, plan)
    modules = dict(model.named_modules())
    for name in styles:
        styles[name] = _complete(model, name, styles[name], modules)
        _check_module(name, modules[name], styles[name], tp)
    whole = [
        name for name, style in styles.items() if style.kind in ("colwise", "rowwise", "vocab")
    ]
    if not whole:
        raise UserError(
            "Tensor(plan=…) splits no module: every style in it is 'sequence' or 'replicate'; "
            "write 'colwise' and 'rowwise' for the Linear modules before and after an activation"
        )
    _check_sequence(
        [name for name, style in styles.items() if style.kind == "sequence"], sequence_parallel
    )
    if loss_parallel and not any(
        style.kind == "vocab" and isinstance(modules[n], nn.Linear) for n, style in styles.items()
    ):
        raise UserError(
            "loss_parallel=True, but the plan makes no Linear 'vocab', whose outputs would stay "
            "split; write 'vocab' for the last one, or set loss_parallel=False"
        )
    _check_owners(model, styles, modules)
    _check_tied(model, styles)
    return styles


def _style(pattern: str, given: Any) -> Style:
    options: Any = {"style": given} if isinstance(given, str) else given
    if not isinstance(options, Mapping) or not isinstance(options.get("style"), str):
        raise UserError(
            f"Tensor(plan={{{pattern!r}: {given!r}}}); a style is one of "
            f"{', '.join(map(repr, STYLES))}, or {{'style': 'colwise', 'parts': 3, 'heads': 12}}"
        )
    kind = options["style"]
    if kind not in STYLES:
        raise UserError(
            f"Tensor(plan={{{pattern!r}: {kind!r}}}): there is no such "
            f"style{did_you_mean(kind, STYLES)} Known are {', '.join(STYLES)}"
        )
    for option, value in options.items():
        if option == "style":
            continue
        if option not in ("parts", "heads") or kind != "colwise":
            raise UserError(
                f"Tensor(plan={{{pattern!r}: …}}): '{kind}' has no option {option!r}; 'colwise' "
                "has 'parts' and 'heads'"
            )
        check_whole(f"Tensor(plan={{{pattern!r}: …}}): {option}", value)
    # 0 parts: not said, see _complete.
    return Style(kind, options.get("parts", 0), options.get("heads"))


def _match(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Style]:
    """Styles by module name; a ``*`` in a pattern stands for one part of a name between two
    dots."""
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, Style] = {}
    by: dict[str, str] = {}
    for pattern, given in plan.items():
        atoms = pattern.split(".")
        style = _style(pattern, given)
        found = [
            n
            for n in names
            if len(n.split(".")) == len(atoms)
            and all(map(fnmatch.fnmatchcase, n.split("."), atoms))
        ]
        if not found:
            raise UserError(
                f"Tensor(plan={{{pattern!r}: …}}) names nothing in the "
                f"model{did_you_mean(pattern, names)} "
                f"Its modules with weights are {', '.join(_with_weights(model)[:12])}"
            )
        for name in found:
            if styles.get(name, style) != style:
                raise UserError(
                    f"Tensor(plan=…): '{by[name]}' makes '{name}' {styles[name].kind}, and "
                    f"'{pattern}' makes it {style.kind}; write patterns that do not overlap"
                )
            styles[name], by[name] = style, pattern
    return styles


def _complete(model: nn.Module, name: str, style: Style, modules: Mapping[str, nn.Module]) -> Style:
    """The style with its number of parts, where a colwise module may hold several; refused where it
    cannot be told."""
    module, parent = modules[name], modules.get(name.rpartition(".")[0], model)
    if style.kind != "colwise" or not isinstance(module, nn.Linear):
        return replace(style, parts=1)
    if isinstance(parent, Attention) and name.endswith("qkv"):
        if style.parts not in (0, 3):
            raise UserError(
                f"'{name}' yields q, k and v, and the plan says parts={style.parts}; write "
                "parts=3, or leave it out"
            )
        return replace(style, parts=3, heads=module.out_features // 3 // parent.head_width)
    if style.parts:
        return style
    last = name.rpartition(".")[2].lower()
    if any(word in last for word in _FUSED_NAMES) or module.out_features == 3 * module.in_features:
        raise UserError(
            f"'{name}' is colwise, and may hold several projections in its {module.out_features} "
            f"outputs (from {module.in_features} inputs). Say how many equal parts lie one after "
            f"another: {{'{name}': {{'style': 'colwise', 'parts': 3}}}} for q, k and v, 'parts': 1 "
            "when it is one"
        )
    return replace(style, parts=1)


def _check_module(name: str, module: nn.Module, style: Style, tp: int) -> None:
    """Raise `UserError` when the module cannot have this style over `tp` workers."""
    what = f"'{name}' ({type(module).__name__})"
    if style.kind in ("colwise", "rowwise") and not isinstance(module, nn.Linear):
        inside = [
            f"{name}.{child}"
            for child, m in module.named_modules()
            if child and isinstance(m, nn.Linear)
        ]
        if inside:
            more = f"; name the Linear modules in it: {', '.join(inside[:6])}"
        else:
            more = "; 'replicate' leaves it whole"
        raise UserError(f"{what}: '{style.kind}' splits torch.nn.Linear{more}")
    if style.kind in ("colwise", "rowwise") and isinstance(
        module, nn.modules.linear.NonDynamicallyQuantizableLinear
    ):
        raise UserError(
            f"'{name}' belongs to a torch.nn.MultiheadAttention, which reads its weights without "
            "calling it; leave it out of the plan, or write attention with a Linear for each of q, "
            "k, v and the output"
        )
    if style.kind == "vocab":
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise UserError(
                f"{what}: 'vocab' splits torch.nn.Embedding and torch.nn.Linear; 'replicate' "
                "leaves it whole"
            )
        if isinstance(module, nn.Embedding):
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, option):
                    raise UserError(
                        f"{what} has {option}, which 'vocab' cannot honour; write 'replicate'"
                    )
    if style.kind in ("sequence", "replicate"):
        return
    if style.kind == "vocab":
        rows = len(module.weight)  # type: ignore[arg-type]
        filled = -(-rows // -(-rows // tp))
        if filled < tp:
            raise UserError(
                f"'{name}' has {rows} rows, and tp={tp} leaves {tp - filled} of the workers "
                f"without any; set tp to {filled} or less, or write 'replicate'"
            )
        return
    size = module.out_features // style.parts if style.kind == "colwise" else module.in_features  # type: ignore[operator]
    side = "outputs" if style.kind == "colwise" else "inputs"
    if style.kind == "colwise" and module.out_features % style.parts:  # type: ignore[operator]
        raise UserError(
            f"'{name}' has {module.out_features} outputs, which are not {style.parts} equal parts"
        )
    if style.heads is not None and (style.heads % tp or size % style.heads):  # type: ignore[operator]
        raise UserError(
            f"'{name}' has {style.heads} attention heads (of {size} {side}), which tp={tp} does "
            f"not divide; {_divisors(style.heads, 'heads')}"
        )
    if size % tp:  # type: ignore[operator]
        each = f" in each of its {style.parts} parts" if style.parts > 1 else ""
        raise UserError(
            f"'{name}' is {style.kind}, and tp={tp} does not divide its {size} {side}{each}; "
            f"{_divisors(size, side)}, or write 'replicate'"  # type: ignore[arg-type]
        )


def _divisors(number: int, what: str) -> str:
    fitting = [str(d) for d in range(1, min(number, 64) + 1) if number % d == 0]
    return f"set tp to one of {', '.join(fitting)}, or change the number of {what}"


def _check_sequence(named: list[str], sequence_parallel: bool) -> None:
    if named and not sequence_parallel:
        raise UserError(
            f"the plan makes '{named[0]}' 'sequence', which is done with sequence_parallel=True; "
            "set that, or write 'replicate'"
        )
    if sequence_parallel and not named:
        raise UserError(
            "sequence_parallel=True, but the plan makes no module 'sequence'; write 'sequence' for "
            "the norms and dropouts that stand between two blocks, or set sequence_parallel=False"
        )


def _check_owners(
    model: nn.Module, styles: Mapping[str, Style], modules: Mapping[str, nn.Module]
) -> None:
    """Raise `UserError` for a module that has colwise children and parameters of its own, about
    which the plan says nothing.

    Used on the children's outputs, such a parameter's gradient would be that of this worker's part
    alone.
    """
    for name, style in styles.items():
        owner = name.rpartition(".")[0]
        own = [key for key, _ in modules.get(owner, model).named_parameters(recurse=False)]
        if style.kind == "colwise" and own and owner and owner not in styles:
            raise UserError(
                f"'{owner}' has a parameter '{own[0]}' of its own beside '{name}', which is "
                "colwise. When it is not used between that and its rowwise partner, write "
                f"'{owner}': 'replicate'; else leave '{name}' whole"
            )


def _check_tied(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Raise `UserError` when one parameter under two names would be split in two ways."""
    seen: dict[int, tuple[str, int | None, int]] = {}
    for owner, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            style = styles.get(owner, Style("replicate"))
            dim = style.dim_of(key)
            name = f"{owner}.{key}" if owner else key
            first, first_dim, first_parts = seen.setdefault(id(parameter), (name, dim, style.parts))
            if (dim, style.parts) != (first_dim, first_parts):
                raise UserError(
                    f"'{first}' and '{name}' are one parameter, and the plan splits them in two "
                    "ways; give both modules one style ('vocab' for an embedding and a head)"
                )


# ---------------------------------------------------------------------- the plans that are shipped


def _gpt(model: nn.Module, sequence_parallel: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "embed": "vocab",
        "layers.*.attn.qkv": "colwise",
        "layers.*.attn.out": "rowwise",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "head": "vocab",
    }
    if sequence_parallel:
        between = ("dropout", "layers.*.attn_norm", "layers.*.mlp_norm", "layers.*.dropout", "norm")
        plan |= dict.fromkeys(between, "sequence")
    return plan


def _mlp(model: nn.Module, sequence_parallel: bool) -> dict[str, Any]:
    """Linear modules in pairs; a last one without a partner has its outputs split and gathered."""
    count = len(model.layers)  # type: ignore[arg-type]
    plan = {f"layers.{number}": ("colwise", "rowwise")[number % 2] for number in range(count)}
    if count % 2:
        plan[f"layers.{count - 1}"] = "vocab"
    return {
        name: {"style": style, "parts": 1} if style == "colwise" else style
        for name, style in plan.items()
    }


#: The plans that are shipped: name -> (model class, the plan of such a model).
PLANS: dict[str, tuple[type[nn.Module], Any]] = {"gpt": (GPT, _gpt), "mlp": (MLP, _mlp)}


def _example(model: nn.Module) -> str:
    linear = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name
    ]
    return f"'{(linear or ['up'])[0]}': 'colwise', '{(linear[1:] or ['down'])[0]}': 'rowwise', …"


def _with_weights(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if name and any(True for _ in module.parameters(recurse=False))
    ]
