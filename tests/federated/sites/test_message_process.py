"""The process of a message: whose code it loads, and the arguments that Flower gives it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
from allhands.errors import UserError
from allhands.federated.sites import client_app, message_process
from allhands.federated.sites.flower_compat import CLIENT_APP


def test_code_that_a_server_ships_is_replaced_by_ours_and_an_unknown_flower_is_refused():
    module = SimpleNamespace(**dict.fromkeys(CLIENT_APP.names))
    message_process.replace_loading(module)
    assert module.install_from_fab(b"anything", skip_prompt=True) is None
    assert (
        module.get_load_client_app_fn(default_app_ref="evil:app", app_path=None, multi_app=True)(
            "id", "1", "x"
        )
        is client_app.app
    )
    with pytest.raises(UserError, match="installs nothing"):
        module.install_app_dependencies("x")
    with pytest.raises(UserError, match=r"has no get_load_client_app_fn: pip install"):
        message_process.replace_loading(
            SimpleNamespace(**dict.fromkeys(CLIENT_APP.names[:-2]), install_app_dependencies=0)
        )


def test_arguments_of_flower_s_superexec_are_known():
    asked = message_process.arguments(
        [
            "--runtime-api-address",
            "127.0.0.1:1",
            "--token",
            "t",
            "--root-certificates",
            "ca",
            "--parent-pid",
            "7",
        ]
    )
    assert (asked.runtime_api_address, asked.token, asked.root_certificates, asked.parent_pid) == (
        "127.0.0.1:1",
        "t",
        "ca",
        7,
    )
    assert not asked.insecure
