"""`allhands schema`: the JSON schema of run files, by which editors complete and check them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from allhands.config import RunConfig

# Arguments that are passed by place, or filled in.
_NOT_WRITTEN = (
    "self",
    "params",
    "optimizer",
    "model",
    "output",
    "target",
    "device",
    "named_params",
)


def schema() -> int:
    """Print the JSON schema of run files: allhands schema > run.schema.json.

    In an editor with a YAML language server, the first line of a run file then is
    # yaml-language-server: $schema=run.schema.json
    """
    print(json.dumps(schema_of_runs(), indent=1))
    return 0


def schema_of_runs() -> dict[str, Any]:
    from allhands.cli.run_objects import known_names

    made = RunConfig.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = "allhands run file"
    made["additionalProperties"] = False
    sections, known = made["$defs"], known_names()
    for section in ("Data", "Loop", *known):
        names = known.get(section, {})
        # A name alone is short for a section.
        if names:
            text = {"type": "string", "anyOf": [{"enum": _spellings(names)}, {}]}
        else:
            text = {"type": "string"}
        sections[section] = {"anyOf": [text, _with_options(sections[section], names)]}
    return made


def _spellings(names: Mapping[str, Any]) -> list[str]:
    return sorted({*names, *(name.lower() for name in names)})


def _with_options(part: dict[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """A section with the options of each name; other names take any."""
    from allhands.cli.typed_options import arguments_of, schema_of, takes_any

    if not names:
        return part
    properties = part["properties"]
    properties["name"] = {**properties["name"], "anyOf": [{"enum": _spellings(names)}, {}]}
    cases = []
    for name, kind in sorted(names.items()):
        takes = arguments_of(kind)
        options = {key: schema_of(one) for key, one in takes.items() if key not in _NOT_WRITTEN}
        options = {key: value for key, value in options.items() if key != "kwargs"}
        then: dict[str, Any] = {"properties": options | {key: {} for key in properties}}
        if not takes_any(takes) and part["title"] != "Strategy":
            then["additionalProperties"] = False
        spelled = {"name": {"enum": _spellings({name: kind})}}
        cases.append({"if": {"properties": spelled, "required": ["name"]}, "then": then})
    return {**part, "allOf": cases}
