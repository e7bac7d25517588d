"""Names of Flower that it does not document, which the package relies on or replaces in its own
processes, each with the reason. They were tried with flwr 1.42.0. Importing this module imports no
Flower."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites.flower import INSTALL

# Name here: module, and name there.
_PRIVATE = {
    # Its commands, which run in processes of ours after something was replaced.
    "flower_superlink": ("flwr.superlink.cli", "flower_superlink"),
    "flower_supernode": ("flwr.supernode.cli.flower_supernode", "flower_supernode"),
    "flower_superexec": ("flwr.supercore.cli", "flower_superexec"),
    "flwr_serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
    # Certificates as `flwr-clientapp` reads them, whose own parser takes long to import.
    "read_certificates": ("flwr.supercore.tls", "validate_and_resolve_root_certificates"),
    # The control interface: for it Flower has a command for people, and nothing for programs.
    "ControlHttpClient": ("flwr.supercore.control", "ControlHttpClient"),
    "RuntimeVersion": ("flwr.supercore.interceptors", "RuntimeVersionHttpInterceptor"),
    "control_pb2": ("flwr.proto", "control_pb2"),
    # An app as it is submitted there.
    "build_fab_from_files": ("flwr.cli.build", "build_fab_from_files"),
    "fab_to_proto": ("flwr.common.serde", "fab_to_proto"),
    "Fab": ("flwr.supercore.fab", "Fab"),
}


def __getattr__(name: str) -> Any:
    if name not in _PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, private = _PRIVATE[name]
    # Of a package, the name may be a module that nothing has imported.
    try:
        return getattr(importlib.import_module(module), private)
    except AttributeError:
        return importlib.import_module(f"{module}.{private}")


@dataclass(frozen=True)
class ReplacedNames:
    """Names in a module of Flower's that are replaced there.

    Attributes:
        module: its full name.
        names: what must be there.
    """

    module: str
    names: tuple[str, ...]

    def load(self) -> Any:
        """The module, imported. An import statement would find a function where the package
        exports one under the module's name.

        Raises:
            UserError: it has not all of the names.
        """
        return self.checked(importlib.import_module(self.module))

    def checked(self, module: Any) -> Any:
        """That module, or what stands for it, if it has all of the names."""
        absent = [name for name in self.names if not hasattr(module, name)]
        if absent:
            raise UserError(f"{self} has no {', '.join(absent)}: {INSTALL}")
        return module

    def set_sleep(self, module: Any, sleep: Callable[[float], object]) -> None:
        """Let the module, which waits by ``time.sleep``, wait in another way.

        Raises:
            UserError: it waits in another way already.
        """
        if getattr(module, "time", None) is not time:
            raise UserError(f"{self} does not wait by time.sleep: {INSTALL}")
        module.time = SimpleNamespace(**{**vars(time), "sleep": sleep})

    def __str__(self) -> str:
        return f"this Flower's {self.module.rpartition('.')[2]}"


# They pull the pieces of a message, and ask anew for one that its sender has announced and not sent
# yet: how often stands in the defaults of their arguments only.
PULLS = ReplacedNames(
    "flwr.supercore.inflatable.inflatable_utils",
    ("pull_objects", "pull_and_inflate_object_from_tree"),
)
# They ask after so many seconds at first, and after twice as many each time up to the cap, until
# their own limit of time ends it (2 hours). Flower's are 1 s, 10 s and 500 tries.
_RETRIES = {"initial_backoff": 0.05, "backoff_cap": 1.0, "max_tries_per_object": None}
# The SuperNode looks for messages every three seconds. It waits for the answer to a message, and
# sends it, by `_push_messages`, which is called when all of the message is there.
SUPERNODE = ReplacedNames("flwr.supernode.start_client_internal", ("time", "_push_messages"))
# The superexec starts a process for each message, and sleeps between two looks for one.
EXECUTOR = ReplacedNames("flwr.supercore.superexec.executor.subprocess_executor", ("subprocess",))
TASK_LOOP = ReplacedNames("flwr.supercore.superexec.run_superexec", ("time",))
# The process of a message and that of a run load the app that was submitted, for which ours stands.
CLIENT_APP = ReplacedNames(
    "flwr.supernode.runtime.run_clientapp",
    (
        "run_clientapp",
        "install_from_fab",
        "get_project_dir",
        "get_load_client_app_fn",
        "install_app_dependencies",
    ),
)
SERVER_APP = ReplacedNames(
    "flwr.superlink.runtime.run_serverapp",
    (
        "install_from_fab",
        "get_fab_metadata",
        "get_project_dir",
        "get_project_config",
        "get_fused_config_from_dir",
        "run_",
    ),
)
# The SuperLink's hook for middleware, without which its control interface would be open, and how
# much memory each of its connections to the database takes.
MIDDLEWARE = ReplacedNames("flwr.superlink.extensions", ("get_middleware",))
DATABASE = ReplacedNames("flwr.supercore.sql_mixin", ("SQLITE_PRAGMAS",))


def retry_soon() -> None:
    """Let Flower ask anew for a piece of a message after 0.05 to 1 s, in this process.

    A message is announced before its pieces are there, so that whoever is quick finds them missing
    in every round.

    Raises:
        UserError: this Flower pulls in another way.
    """
    module = PULLS.load()
    for name in PULLS.names:
        options = getattr(module, name).__kwdefaults__ or {}
        if not _RETRIES.keys() <= options.keys():
            raise UserError(f"this Flower's {name} has no {', '.join(_RETRIES)}: {INSTALL}")
        options.update(_RETRIES)
