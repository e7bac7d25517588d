"""Flower's grid in memory: messages reach the handlers of nodes, late, twice, never or spoilt, as a
test says."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

Handler = Callable[[RecordDict], RecordDict]


@dataclass
class Node:
    """A connected site.

    Attributes:
        handler: gives the reply.
        key: its public key.
        since: when it was activated.
        delays: by kind of message, seconds until the reply is there.
        loses: kinds of messages of which the reply never comes.
        twice: each reply comes twice.
        spoil: changes a reply on its way.
        fails: by kind of message, the error that comes instead.
        asked: the requests so far.
    """

    handler: Handler
    key: bytes = b""
    since: str = "1"
    delays: dict[str, float] = field(default_factory=dict)
    loses: set[str] = field(default_factory=set)
    twice: bool = False
    spoil: Callable[[str, RecordDict], RecordDict] | None = None
    fails: dict[str, str] = field(default_factory=dict)
    asked: list[RecordDict] = field(default_factory=list)


class FakeGrid:
    """Has what the server's side uses of Flower's `Grid`. A handler is called when the reply is
    pulled, so that only replies that were pulled are in memory.

    Attributes:
        nodes: those that are connected, by number; a test adds, changes and removes them.
        before_pull: called before each pull, for what shall happen in mid-round.
    """

    def __init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
        self.nodes: dict[int, Node] = {}
        self.before_pull: Callable[[], None] = lambda: None
        self._messages: dict[str, tuple[Message, float]] = {}
        self._again: dict[str, Message] = {}
        self.pulls = 0

    def add(self, node: int, handler: Handler, **options: Any) -> Node:
        """Connect a node."""
        self.nodes[node] = Node(handler, **options)
        return self.nodes[node]

    def get_nodes(self) -> Iterable[Any]:
        return [
            SimpleNamespace(node_id=number, public_key=node.key, last_activated_at=node.since)
            for number, node in self.nodes.items()
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            made = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = made
            self._messages[made] = message, time.monotonic()
            ids.append(made)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.before_pull()
        (wanted,) = message_ids  # one at a time
        self.pulls += 1
        if wanted in self._again:
            return [self._again.pop(wanted)]
        if wanted not in self._messages:
            return []
        message, at = self._messages[wanted]
        kind, node = message.metadata.message_type, self.nodes.get(message.metadata.dst_node_id)
        if node is None:
            del self._messages[wanted]
            return [Message(Error(1, "the node is not available"), reply_to=message)]
        if kind in node.loses or time.monotonic() - at < node.delays.get(kind, 0.0):
            return []
        del self._messages[wanted]
        if kind in node.fails:
            return [Message(Error(2, node.fails[kind]), reply_to=message)]
        node.asked.append(message.content)
        reply = node.handler(message.content)
        if node.spoil is not None:
            reply = node.spoil(kind, reply)
        answer = Message(reply, reply_to=message)
        if node.twice:
            self._again[wanted] = Message(reply, reply_to=message)
            return [answer, Message(reply, reply_to=message)]
        return [answer]
