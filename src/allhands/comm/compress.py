"""The option ``compress=``: which codec tensors travel in, checked in one place for all that offer
it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from allhands.checks import is_number, is_whole
from allhands.errors import UserError, did_you_mean, warn_renamed

#: The codecs by name, and the defaults of their options.
CODECS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "bf16": {},
    "int8": {},
    "1bit": {},
    "2bit": {"threshold": 0.5},
    "topk": {"keep": 0.01},
    "powersgd": {"rank": 1, "start": 10},
}
_WHOLE = {"rank": 1, "start": 0}  # the least value of each option that is a whole number
_OLD_NAMES = {"8bit": "int8"}
_OLD_OPTIONS = {"topk": {"ratio": "keep", "fraction": "keep"}}

# Why an exchange does not offer a codec. It is said with what to write instead.
NO_MATRICES = "powersgd needs the gradients of a whole step as matrices, which only DDP has"
NO_THRESHOLD = "the threshold of 2bit is chosen for gradients, and weights change by other amounts"


def checked_compress(
    given: Any,
    what: str,
    refused: Mapping[str, str] | None = None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any] | None:
    """The codec that a user has chosen, with all its options.

    Args:
        given: a name, ``{"name": …, option: …}``, or None.
        what: the option in its call, for messages, such as ``"DDP(compress="``; a `)` is added
            where a parenthesis is open.
        refused: codecs that are not offered here, and why; the message names int8 instead.
        more: further options that only this place has, and their defaults, by codec.

    Returns:
        ``{"name": …, option: …}``; None for None.
    """
    if given is None:
        return None
    here = f"{what}{given!r}{')' if '(' in what else ''}"
    wanted = {"name": given} if isinstance(given, str) else given
    offered = [name for name in CODECS if name not in (refused or {})]
    if not isinstance(wanted, Mapping) or "name" not in wanted:
        raise UserError(
            f"{here}: write the name of a codec, or {{'name': 'topk', 'keep': 0.01}}, or None, "
            f"which sends numbers as they are; codecs are {', '.join(offered)}"
        )
    name = wanted["name"]
    if name in _OLD_NAMES:
        warn_renamed(f"the codec '{name}'", f"'{_OLD_NAMES[name]}'")
        name = _OLD_NAMES[name]
    if name in (refused or {}):
        assert refused is not None
        raise UserError(f"{here}: {refused[name]}; write 'int8'")
    if name not in CODECS:
        hint = did_you_mean(name, offered)
        raise UserError(f"{here}: there is no codec {name!r}{hint} Known are: {', '.join(offered)}")
    options = {**CODECS[name], **(more or {}).get(name, {})}
    for option, value in wanted.items():
        if option == "name":
            continue
        new = _OLD_OPTIONS.get(name, {}).get(option, option)
        if new != option:
            warn_renamed(f"the option '{option}' of '{name}'", f"'{new}'")
        if new not in options:
            hint = did_you_mean(option, options)
            raise UserError(
                f"{here}: the codec '{name}' has no option {option!r}{hint} Its options: "
                f"{', '.join(options) or 'none'}"
            )
        if option in CODECS[name] or new != option:
            _check_value(
                here, name, option, value, _WHOLE.get(new), at_most=1 if new == "keep" else math.inf
            )
        options[new] = value
    return {"name": name, **options}


def merged_old(compress: Any, old: Any, where: str, name: str) -> Any:
    """What was chosen by ``compress=``, or by an option that had another name before."""
    if old is None:
        return compress
    if compress is not None:
        raise UserError(f"{where}({name}={old!r}, compress={compress!r}): leave {name} out")
    warn_renamed(f"{where}({name}=…)", f"{where}(compress=…)")
    return old


def in_words(compress: Mapping[str, Any] | None) -> str:
    """The codec and its options in a few words: ``topk, keep 0.01``."""
    if compress is None:
        return "none"
    options = [f"{option} {value}" for option, value in compress.items() if option != "name"]
    return ", ".join([compress["name"], *options])


def _check_value(
    here: str, name: str, option: str, value: Any, least: int | None, at_most: float
) -> None:
    if least is not None:
        good, bound = is_whole(value, least), f"a whole number of at least {least}"
    else:
        good = is_number(value) and 0 < value <= at_most and math.isfinite(value)
        bound = "a number above 0" + (f", at most {at_most}" if at_most < math.inf else "")
    if not good:
        raise UserError(f"{here}: {option}={value!r} of '{name}'; it must be {bound}")
