"""Messages to sites and their replies, of which one at a time is in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from allhands.federated.sites.event_log import EventLog
from allhands.federated.sites.site_request import RECORD

_INTERVAL = 0.2  # seconds between two looks at the beginning
_LONGEST = 2.0  # and at most, in a round that takes long
_PATIENCE = 0.05  # of the time that has passed is added to it by waiting between looks
_LOOK = 2.0  # seconds between two looks at who is there
_MARGIN = 60.0  # seconds for which a message lives on, so that a late reply is known as one


@dataclass(frozen=True)
class Sent:
    """A message that has no reply yet."""

    id: str
    site: str
    node: int
    kind: str
    round: int
    at: float


@dataclass(frozen=True)
class Reply:
    """A site's answer.

    Attributes:
        sent: what it answers.
        content: the records; None where there are none.
        error: why there are none, one line.
        seconds: since the message was sent.
    """

    sent: Sent
    content: RecordDict | None
    error: str
    seconds: float

    @property
    def config(self) -> dict[str, Any]:
        """What the record `RECORD` holds; empty where there is none."""
        record = None if self.content is None else self.content.get(RECORD)
        return dict(record) if isinstance(record, ConfigRecord) else {}


class Post:
    """Sends messages through Flower's grid and pulls replies one by one.

    Args:
        grid: Flower's `Grid`, or what has its `push_messages` and `pull_messages`.
        events: what is dropped is said there.

    Attributes:
        dropped: replies so far that nobody waited for any more: late, or twice.
    """

    def __init__(self, grid: Any, events: EventLog) -> None:
        self.grid, self.events = grid, events
        self.dropped = 0
        # And until when their replies may still come.
        self._late: dict[str, tuple[Sent, float]] = {}

    def send(
        self,
        kind: str,
        round_: int,
        contents: Iterable[tuple[str, int, RecordDict]],
        seconds: float,
    ) -> list[Sent]:
        """Send to sites.

        Args:
            kind: "query", "train" or "evaluate".
            round_: the round.
            contents: for each site its name, its node and what it gets; records that sites share
                travel once.
            seconds: for which a reply is waited.

        Returns:
            Those that are on their way.
        """
        given = list(contents)
        messages = [
            Message(
                content=content,
                dst_node_id=node,
                message_type=kind,
                ttl=seconds + _MARGIN,
                group_id=str(round_),
            )
            for _, node, content in given
        ]
        ids = list(self.grid.push_messages(messages)) if messages else []
        now = time.monotonic()
        sent = []
        for place, (site, node, _) in enumerate(given):
            if place < len(ids) and ids[place]:
                sent.append(Sent(str(ids[place]), site, node, kind, round_, now))
            else:
                self.events.say(
                    "failed",
                    site=site,
                    round=round_,
                    reason="the SuperLink did not take the message",
                )
        return sent

    def pull(self, sent: Sent) -> Reply | None:
        """The reply, when it is there. Others that come with it are dropped."""
        found = None
        for message in self.grid.pull_messages([sent.id]):
            if message.metadata.reply_to_message_id == sent.id and found is None:
                found = _reply(sent, message)
            else:
                self._drop(sent.site, sent.round, "it came twice, or nobody has asked for it")
        return found

    def replies(
        self,
        sent: Iterable[Sent],
        seconds: float,
        meanwhile: Callable[[], object] = lambda: None,
        gone: Callable[[Sent], str] = lambda sent: "",
    ) -> Iterator[Reply]:
        """Replies as they come, each pulled when the one before is done with. Ends when all are
        here, or with the time; what is missing then is late.

        Args:
            sent: what is waited for.
            seconds: for which it is.
            meanwhile: called every few seconds.
            gone: called after it; why a reply will not come any more, or "".

        Yields:
            A reply; one without content and with the error "" for each site that is late.
        """
        began = looked = time.monotonic()
        left = list(sent)
        while left:
            for one in list(left):
                reply = self.pull(one)
                if reply is not None:
                    left.remove(one)
                    yield reply
                    del reply  # its arrays too, before the next is pulled
            now = time.monotonic()
            if now - began >= seconds:
                break
            if now - looked >= _LOOK:
                looked = now
                meanwhile()
                for one in list(left):
                    reason = gone(one)
                    if reason:
                        left.remove(one)
                        self.give_up(one)
                        yield Reply(one, None, reason, now - one.at)
                self.sweep()
            if left:
                pause = min(_LONGEST, max(_INTERVAL, _PATIENCE * (now - began)))
                time.sleep(max(0.0, min(pause, began + seconds - time.monotonic())))
        for one in left:
            self.give_up(one)
            yield Reply(one, None, "", time.monotonic() - one.at)

    def give_up(self, sent: Sent) -> None:
        """Nobody waits for this reply any more; `sweep` throws it away when it comes."""
        self._late[sent.id] = sent, time.monotonic() + 2 * _MARGIN

    def sweep(self) -> None:
        """Throw away late replies that have come since."""
        for sent, until in list(self._late.values()):
            for message in self.grid.pull_messages([sent.id]):
                self._late.pop(sent.id, None)
                if message.has_content():
                    self._drop(
                        sent.site,
                        sent.round,
                        f"it came {time.monotonic() - sent.at:.0f} s after it was asked for",
                    )
            if time.monotonic() > until:
                self._late.pop(sent.id, None)

    def _drop(self, site: str, round_: int, reason: str) -> None:
        self.dropped += 1
        self.events.say("dropped", site=site, round=round_, reason=reason)


def _reply(sent: Sent, message: Message) -> Reply:
    seconds = time.monotonic() - sent.at
    if message.has_error():
        return Reply(
            sent, None, last_line(message.error.reason) or f"error {message.error.code}", seconds
        )
    if not message.has_content():
        return Reply(sent, None, "an empty reply", seconds)
    return Reply(sent, message.content, "", seconds)


def last_line(text: object, most: int = 400) -> str:
    """The last line of a text that somebody else wrote: of a traceback, the error. At most so long,
    and printable."""
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    kept = "".join(letter if letter.isprintable() else " " for letter in lines[-1]) if lines else ""
    return kept if len(kept) <= most else kept[: most - 1] + "…"
