"""What an optimizer is made of, on its way to the workers and back.

PyTorch pickles the parameter groups, the state and the defaults of an optimizer. It leaves out the
hooks that are registered with it and what a subclass keeps beside them.
"""

from __future__ import annotations

import sys
import types
from typing import Any

_HOOKS = tuple(
    f"_optimizer_{method}_{when}_hooks"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)


def whole_state(value: Any) -> dict[str, Any] | None:
    """The attributes of an optimizer that pickles as PyTorch's do; None of any other object.

    A class with a `__getstate__` of its own says itself what is sent; the hooks go with it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.optim.Optimizer):
        return None
    kind: Any = type(value)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return None
    attributes = dict(vars(value))
    if kind.__getstate__ is not torch.optim.Optimizer.__getstate__:
        own = value.__getstate__()
        if not isinstance(own, dict):
            return None
        return {name: attributes[name] for name in _HOOKS if name in attributes} | own
    # A scheduler wraps `step` with a weak reference, which cannot be sent.
    if getattr(attributes.get("step"), "_wrapped_by_lr_sched", False):
        step = attributes.pop("step").__wrapped__
        if step is not kind.step:
            attributes["step"] = types.MethodType(step, value)
    return attributes
