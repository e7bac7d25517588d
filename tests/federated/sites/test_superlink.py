"""Control of the SuperLink is for its own machine."""

from __future__ import annotations

import asyncio

import pytest

from allhands.federated.sites.superlink import LocalControl


def ask(client: str, path: str, server: str = "10.0.0.1") -> int:
    """The status of the answer to a request."""
    sent = []

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "client": (client, 40000), "server": (server, 8000)}
    asyncio.run(LocalControl(inner)(scope, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.1"])
def test_this_machine_may_control(client):
    assert ask(client, "/v1/control/start-run") == 200


@pytest.mark.parametrize("client", ["10.0.0.2", "::ffff:10.0.0.2", "2001:db8::1", "localhost", ""])
@pytest.mark.parametrize(
    "path", ["/v1/control/start-run", "/v1/control/register-node", "/prefix/v1/control/stop-run"]
)
def test_others_may_not(client, path):
    assert ask(client, path) == 403
    assert ask(client, "/v1/fleet/pull-messages") == 200


def test_flower_serves_control_where_we_refuse_it():
    router = pytest.importorskip("flwr.superlink.routers.control.router")
    paths = [route.path for route in router.router.routes]
    assert any("start-run" in path for path in paths)
    assert all(path.startswith("/v1/control/") for path in paths), paths


def test_flower_has_the_hook_that_we_use():
    extensions = pytest.importorskip("flwr.superlink.extensions")
    main = pytest.importorskip("flwr.superlink.main")
    assert main.extensions is extensions
    assert extensions.get_middleware() == ()
