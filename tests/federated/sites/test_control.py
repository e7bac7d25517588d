"""The list of keys, as the SuperLink is told of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
from allhands.errors import UserError
from allhands.federated.sites.control import Control, Unanswered


class SuperLink:
    """Answers as Flower's control interface does; `nodes` by key: id and status."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, list] = {}
        self.down = False

    def ListNodes(self, request):
        if self.down:
            import httpx

            raise httpx.ConnectError("refused")
        nodes = [
            SimpleNamespace(public_key=key, node_id=number, status=status)
            for key, (number, status) in self.nodes.items()
        ]
        return SimpleNamespace(nodes_info=nodes)

    def RegisterNode(self, request):
        assert request.public_key not in self.nodes  # "Public key already in use"
        self.nodes[request.public_key] = [len(self.nodes) + 1, "registered"]

    def UnregisterNode(self, request):
        (node,) = (node for node in self.nodes.values() if node[0] == request.node_id)
        assert node[1] != "unregistered"  # "already deleted"
        node[1] = "unregistered"


@pytest.fixture
def superlink(monkeypatch):
    made = SuperLink()
    monkeypatch.setattr(
        "flwr.supercore.control.ControlHttpClient.from_server_address", lambda **_: made
    )
    return made


def test_exactly_the_keys_of_the_list_are_let_in(superlink):
    control = Control("127.0.0.1:1", None)
    control.register({"a": b"A", "b": b"B"})
    control.register({"a": b"A", "b": b"B"})
    assert superlink.nodes == {b"A": [1, "registered"], b"B": [2, "registered"]}
    superlink.nodes[b"A"][1] = "online"
    control.register({"a": b"A", "c": b"C"})
    control.register({"a": b"A", "c": b"C"})
    assert superlink.nodes == {
        b"A": [1, "online"],
        b"B": [2, "unregistered"],
        b"C": [3, "registered"],
    }
    with pytest.raises(UserError, match="the key of b was taken off the list of sites before"):
        control.register({"b": b"B"})


def test_a_superlink_that_is_gone_is_told(superlink):
    superlink.down = True
    with pytest.raises(Unanswered, match="ListNodes: refused"):
        Control("127.0.0.1:1", None).register({})
