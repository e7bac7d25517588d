"""COALA's configuration: every key with its type, its default, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from allhands.config.reading import nearest
from allhands.errors import UserError
from allhands.federated.coala.config_sections import (
    ClientConfig,
    CoalaData,
    CoalaSection,
    Distributed,
    Heterogeneity,
    ServerConfig,
    Tracking,
    Whole,
    only,
)

# Keys that COALA's code reads although its file of defaults does not have them.
_ELSEWHERE = {
    "index": "it picks a remote client; clients are simulated here: leave it out",
    "server_addr": "it is the address of a remote server; clients are simulated here: leave it out",
    "tracker_addr": "it is the address of a remote tracker; leave it out",
    "num_of_clusters": "it belongs to COALA's application ClusterFL; leave it out",
    "server.local_epoch": "it belongs to semi-supervised training; write client.local_epoch",
}


class Config(CoalaSection):
    """The whole configuration."""

    task_id: str = Field(default="", description="name in what is printed and of saved models")
    data: CoalaData = CoalaData()
    model: str = Field(
        default="lenet",
        description="lenet, simple_cnn, vgg9, resnet18, rnn, mlp; others through register_model",
    )
    test_mode: Literal["test_in_client", "test_in_server"] = Field(
        default="test_in_client", description="on each client's test samples, or on all of them"
    )
    test_method: Literal["average", "weighted"] = Field(
        default="average", description="test_in_client: all clients alike, or by their test samples"
    )
    server: ServerConfig = ServerConfig()
    client: ClientConfig = ClientConfig()
    gpu: Whole = Field(
        default=0,
        description="number of processes in all; 0 and 1: this one, without and with a GPU if "
        "there is one",
    )
    distributed: Distributed = Distributed()
    is_remote: Any = only(
        False, "clients are simulated; for real sites run `allhands federated server` and `site`"
    )
    local_port: Any = only(22, "it is the port of a remote service; leave it out")
    tracking: Tracking = Tracking()
    resource_heterogeneous: Heterogeneity = Heterogeneity()
    seed: Whole = Field(
        default=0,
        description="decides initial weights, the split, the cohorts, the order of samples and "
        "dropout",
    )
    checkpoint_path: Any = only("", "it belongs to COALA's application splitFL")
    executor: str = Field(
        default="auto", description="not in COALA: auto, serial, graph or stacked"
    )
    on_client_failure: Literal["stop", "retry", "skip"] = Field(
        default="stop",
        description="not in COALA: what happens when a client's training raises; all name it with "
        "its traceback",
    )

    @model_validator(mode="after")
    def _together(self) -> Config:
        if self.client.rounds not in (None, self.server.rounds):
            raise ValueError(
                f"client.rounds = {self.client.rounds}, and server.rounds = {self.server.rounds}, "
                "which decides; remove client.rounds"
            )
        size = self.distributed.world_size
        if size not in (0, max(1, self.gpu)):
            raise ValueError(
                f"gpu = {self.gpu} and distributed.world_size = {size}; gpu is the number of "
                f"processes: set gpu to {size}"
            )
        if self.distributed.rank >= max(1, size, self.gpu):
            raise ValueError(
                f"distributed.rank = {self.distributed.rank} of {max(1, size, self.gpu)} "
                "processes; the first is 0"
            )
        return self


def check(given: Mapping[str, Any] | Config | None) -> Config:
    """The configuration with all its defaults.

    Args:
        given: keys and values, nested; what is left out has its default.

    Raises:
        UserError: an unknown key (with the nearest one), a value of the wrong type, or one that
            cannot be honoured; all are named.
    """
    if isinstance(given, Config):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise UserError(
            f"the configuration is a {type(given).__name__}; pass a dict such as {{'data': "
            f"{{'dataset': 'cifar10'}}}}"
        )
    try:
        return Config.model_validate(_plain(given or {}))
    except ValidationError as failed:
        raise UserError("\n  ".join(_describe(error) for error in failed.errors())) from None


def load_config(file: str | Path, conf: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a YAML file; what is in `conf` wins over it, key by key.

    Returns:
        The keys that were written, nested, for `init`. They are checked.

    Raises:
        UserError: the file cannot be read or is no YAML, or a key is wrong, see `init`.
    """
    path = Path(file)
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"the configuration {str(path)!r} cannot be read: {error.strerror}"
        ) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if read is not None and not isinstance(read, dict):
        raise UserError(
            f"{path} holds a {type(read).__name__}; it must hold keys and values, such as 'gpu: 2'"
        )
    merged = _merge(read or {}, _plain(conf or {}))
    try:
        check(merged)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return merged


def table() -> str:
    """All keys with their defaults and meanings, as a table in Markdown."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for path, field in _fields(Config):
        shown = "not set" if field.default is None else f"`{field.default!r}`"
        rows.append(f"| `{path}` | {shown} | {field.description} |")
    return "\n".join(rows)


def _fields(section: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _fields(inner, f"{above}{name}.")
        else:
            yield above + name, field


def _plain(value: Any) -> Any:
    """Nested mappings (OmegaConf's too) as dicts."""
    return (
        {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value
    )


def _merge(base: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in new.items():
        old = merged.get(key)
        merged[key] = (
            _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
        )
    return merged


def _describe(error: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        if path in _ELSEWHERE:
            return f"{path}: {_ELSEWHERE[path]}"
        section: Any = Config
        for part in error["loc"][:-1]:
            section = section.model_fields[part].annotation
        return (
            f"{path}: there is no such key; {nearest(str(error['loc'][-1]), section.model_fields)}"
        )
    if error["type"] == "value_error":
        return f"{path}{': ' if path else ''}{error['ctx']['error']}"
    what = (
        str(error["msg"])
        .replace("Input should be", "it must be")
        .replace("a valid ", "a ")
        .replace("integer", "whole number")
    )
    return f"{path} = {error['input']!r}: {what}"
