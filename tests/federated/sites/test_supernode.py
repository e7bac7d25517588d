"""What this package changes in Flower's SuperNode."""

import time
from types import SimpleNamespace

import pytest

from allhands.errors import UserError
from allhands.federated.sites import supernode


def test_a_supernode_looks_more_often(monkeypatch):
    module, waits = SimpleNamespace(time=time), []
    supernode.look_more_often(module)
    assert module.time is not time
    monkeypatch.setattr(time, "sleep", waits.append)
    for seconds in (3, 0.5, 0.05):  # for the server, for a process of this machine, for a moment
        module.time.sleep(seconds)
    assert waits == [supernode.INTERVAL, supernode.LOCAL, 0.05]
    with pytest.raises(UserError, match="does not wait by time.sleep"):
        supernode.look_more_often(SimpleNamespace())


def test_a_supernode_tells_of_a_message_before_it_waits_for_the_answer():
    order = []
    module = SimpleNamespace(
        time=time, _push_messages=lambda state, *, send: order.append((state, send)) or 7
    )
    supernode.tell_of_tasks(module, lambda: order.append("told"))
    assert module._push_messages("state", send="send") == 7
    assert order == ["told", ("state", "send")]
    with pytest.raises(UserError, match="start_client_internal has no _push_messages"):
        supernode.tell_of_tasks(SimpleNamespace(time=time), list)
