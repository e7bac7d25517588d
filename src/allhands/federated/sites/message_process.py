"""Stands for `flwr-clientapp`: the process of one message, which runs our ClientApp whatever app the server has submitted.

Code that comes from elsewhere is neither unpacked nor run.
"""

from __future__ import annotations

import importlib
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites import flower

_REPLACED = ("install_from_fab", "get_project_dir", "get_load_client_app_fn", "install_app_dependencies")


def replace_loading(module: Any) -> None:
    """Let Flower's process take our app for the one that was submitted, and write nothing of that one to the disk.

    Raises:
        UserError: this Flower has not the names that are replaced.
    """
    absent = [name for name in _REPLACED if not hasattr(module, name)]
    if absent:
        raise UserError(f"this Flower's run_clientapp has no {', '.join(absent)}: {flower.INSTALL}")

    def load(*_: Any) -> Any:
        from allhands.federated.sites.client_app import app

        return app

    def install(*_: Any, **__: Any) -> Any:
        raise UserError("this site installs nothing that a server asks for")

    module.install_from_fab = lambda *_, **__: None
    module.get_project_dir = lambda *_: None
    module.get_load_client_app_fn = lambda **_: load
    module.install_app_dependencies = install


def main() -> None:
    """`flwr-clientapp`, with its own arguments."""
    flower.require()
    replace_loading(importlib.import_module("flwr.supernode.runtime.run_clientapp"))
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    flwr_clientapp()


if __name__ == "__main__":
    main()
