"""Flower's SuperLink, whose control interface answers this machine only.

Flower serves three interfaces on one port: to sites (their keys are checked), to the server's own
processes (their secret is checked), and the one for control, which needs no login: whoever reaches
the port may submit an app, stop a run, or register a key. Here, control is refused to everybody who
is not on this machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

from allhands.federated.sites import flower, flower_compat

_CONTROL = "/v1/control"


class LocalControl:
    """Refuses requests to the control interface that come from other machines. An ASGI application
    around another."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and _CONTROL in scope["path"] and not is_local(scope):
            await send(
                {
                    "type": "http.response.start",
                    "status": 403,
                    "headers": [(b"content-type", b"text/plain")],
                }
            )
            await send(
                {"type": "http.response.body", "body": b"control is for the server's own machine"}
            )
            return
        await self.app(scope, receive, send)


def is_local(scope: dict[str, Any]) -> bool:
    """Whether a request comes from this machine: over loopback, or from the very address that it
    went to."""
    (client, *_), (server, *_) = scope.get("client") or ("",), scope.get("server") or ("",)
    try:
        parsed = ipaddress.ip_address(client)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return client == server or (mapped or parsed).is_loopback


def main() -> None:
    """`flower-superlink`, with its own arguments."""
    flower.require()
    from starlette.middleware import Middleware

    extensions, sql_mixin = flower_compat.MIDDLEWARE.load(), flower_compat.DATABASE.load()
    before = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(LocalControl), *before())
    # Flower gives each connection to the database 64 MB of cache and a view of 256 MB of the file,
    # and has up to 15 of them: the messages on their way would be in memory after all.
    pragmas: Any = {
        **dict(sql_mixin.SQLITE_PRAGMAS),
        "cache_size": "-4000",
        "mmap_size": "0",
    }.items()
    sql_mixin.SQLITE_PRAGMAS = tuple(pragmas)
    flower_compat.flower_superlink()


if __name__ == "__main__":
    main()
