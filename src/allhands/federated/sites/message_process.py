"""Stands for `flwr-clientapp`: the process of one message, which runs our ClientApp whatever app
the server has submitted.

Code that comes from elsewhere is neither unpacked nor run.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites import flower, flower_compat


def replace_loading(module: Any) -> None:
    """Let Flower's process take our app for the one that was submitted, and write nothing of that
    one to the disk.
    """
    flower_compat.CLIENT_APP.checked(module)

    def load(*_: Any) -> Any:
        from allhands.federated.sites.client_app import app

        return app

    def install(*_: Any, **__: Any) -> Any:
        raise UserError("this site installs nothing that a server asks for")

    module.install_from_fab = lambda *_, **__: None
    module.get_project_dir = lambda *_: None
    module.get_load_client_app_fn = lambda **_: load
    module.install_app_dependencies = install


def arguments(given: list[str]) -> argparse.Namespace:
    """Those of `flwr-clientapp`, as Flower's superexec writes them. Its own parser comes with the
    whole SuperNode, which takes longer to import than all else that happens here."""
    parser = argparse.ArgumentParser(prog="flwr-clientapp", allow_abbrev=False)
    parser.add_argument("--runtime-api-address", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--root-certificates")
    parser.add_argument("--parent-pid", type=int)
    return parser.parse_args(given)


def prepare() -> Any:
    """Flower's module that runs a message, with our app in it."""
    flower_compat.retry_soon()
    module = flower_compat.CLIENT_APP.load()
    replace_loading(module)
    return module


def run(given: list[str]) -> None:
    """`flwr-clientapp`, with these arguments."""
    asked = arguments(given)
    module = prepare()
    module.run_clientapp(
        runtime_api_address=asked.runtime_api_address,
        token=asked.token,
        insecure=asked.insecure,
        certificates=flower_compat.read_certificates(asked.root_certificates, asked.insecure),
        parent_pid=asked.parent_pid,
        runtime_dependency_install=False,
    )


def main() -> None:
    """`flwr-clientapp`, with its own arguments."""
    flower.require()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
