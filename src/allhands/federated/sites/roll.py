"""Who is there: which node is which site, whether it trains the same thing, and how long the server
waits for sites."""

from __future__ import annotations

import hmac
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from allhands.errors import UserError
from allhands.federated.sites.event_log import EventLog
from allhands.federated.sites.post import Post, Reply, Sent, last_line
from allhands.federated.sites.settings import Sites
from allhands.federated.sites.site_keys import check_key, check_token
from allhands.federated.sites.site_request import RECORD

_INTERVAL = 0.5  # seconds between two looks while waiting
_SAY = 10.0  # seconds between two lines about those that are missing
_GREETING = 60.0  # seconds for which a round waits for the answer of a node that has just come
_AGAIN = 10.0  # seconds after which a node is asked again whose answer was an error, or none


@dataclass(frozen=True)
class Present:
    """A site that is connected and has answered that it trains the same thing.

    Attributes:
        node: by which Flower knows it.
        since: when it was activated, in Flower's words; another one after it was started anew.
        samples, tests: how many it trains on, and how many its model is measured on.
        at: when it was greeted, of the monotonic clock.
        proof: that it knows its token; None: none.
    """

    node: int
    since: str
    samples: int
    tests: int
    at: float
    proof: str | None = None


class Roll:
    """Keeps the sites of a run.

    A node is a site by its key, where there is an allow list, and by the name that it gives
    otherwise. Each is greeted once, with a description of what is trained, and again after it was
    started anew; one that differs is refused, and not asked to train.

    Args:
        grid: Flower's `Grid`; `get_nodes` is asked.
        names: of all sites, in the order of the clients.
        allowed: public key by name; None where nodes have no keys.
        tokens: the file of tokens; None: none are asked for.
        settings: how long to wait.
        events: what happens is said there.
        post: sends the greetings.
        description: what is trained, as JSON text; see `allhands.federated.sites.describe`.

    Attributes:
        present: those that take part, by name.
    """

    def __init__(
        self,
        grid: Any,
        names: Sequence[str],
        allowed: Mapping[str, bytes] | None,
        tokens: Path | None,
        settings: Sites,
        events: EventLog,
        post: Post,
        description: str,
    ) -> None:
        self.grid, self.names, self.allowed, self.tokens = grid, list(names), allowed, tokens
        self.settings, self.events, self.post = settings, events, post
        self.description = description
        self.needed = settings.of(self.names)
        self.present: dict[str, Present] = {}
        self.run = ""  # its identity, which the sites keep their state by
        self.round = 0  # the one that is next or under way, for the events
        # Greetings under way by id, with the node's time of activation.
        self._asked: dict[str, tuple[Sent, str]] = {}
        # Nodes (number and time of activation) that were greeted before.
        self._met: set[tuple[int, str]] = set()
        # Nodes, as in `_met`, that are sites but for a line in the file of tokens, which may be
        # added at any time, or but for another node of that name, which may be one that has died
        # and is not missed yet.
        self._aside: dict[tuple[int, str], tuple[str, Present]] = {}
        self._secret = secrets.token_bytes(32)
        # Nodes (number and time of activation) that are not greeted before this time.
        self._turned_away: dict[tuple[int, str], float] = {}

    def connected(self) -> dict[str, int]:
        """The node of each site that takes part, in the order of the clients."""
        return {name: self.present[name].node for name in self.names if name in self.present}

    def missing(self) -> list[str]:
        return [name for name in self.names if name not in self.present]

    def gone(self, sent: Sent) -> str:
        """Why a site will not answer a message any more: it has left, or was started anew, since.
        "" where it may."""
        there = self.present.get(sent.site)
        if there is None:
            return "it has left in mid-round"
        if there.node != sent.node or there.at > sent.at:
            return "it was started anew in mid-round"
        return ""

    # ------------------------------------------------------------------ looking

    def greet(self) -> None:
        """Look who is connected, greet those that have come, and take in their answers; waits for
        nothing."""
        nodes = {info.node_id: info for info in self.grid.get_nodes()}
        for site, there in list(self.present.items()):
            info = nodes.get(there.node)
            if info is None or info.last_activated_at != there.since:
                self._leave(
                    site, "it is no longer connected" if info is None else "it was started anew"
                )
                continue
            objection = self._no_token(site, there)
            if objection is not None:
                self._leave(site, objection)
                self._put_aside(site, there)
        for sent, since in list(self._asked.values()):
            info = nodes.get(sent.node)
            if info is None or info.last_activated_at != since:
                self._drop(sent)
        for key in [key for key in self._turned_away if key[0] not in nodes]:
            del self._turned_away[key]
        for key, (site, there) in list(self._aside.items()):
            info = nodes.get(there.node)
            if info is None or info.last_activated_at != there.since:
                del self._aside[key]
            elif site not in self.present and self._no_token(site, there) is None:
                del self._aside[key]
                self._admit(site, replace(there, at=time.monotonic()))
        self._greet_new(nodes)
        self._answers()

    def _greet_new(self, nodes: Mapping[int, Any]) -> None:
        busy = {there.node for there in self.present.values()} | {
            sent.node for sent, _ in self._asked.values()
        }
        new = []
        for node, info in nodes.items():
            if node in busy or time.monotonic() < self._turned_away.get(
                (node, info.last_activated_at), 0.0
            ):
                continue
            site = ""
            if self.allowed is not None:
                found, reason = check_key(self.allowed, info.public_key)
                if found is None or found not in self.names:
                    self._turn_away(node, info.last_activated_at)
                    self.events.say(
                        "stranger",
                        node=str(node),
                        reason=reason or f"'{found}' is none of sites.names",
                    )
                    print(f"a node that is no site of this run: {reason or found}", flush=True)
                    continue
                site = found
            new.append(
                (site, node, self._greeting(site, self._challenge_of(node, info.last_activated_at)))
            )
        for sent in self.post.send("query", self.round, new, self.settings.round_timeout):
            self._asked[sent.id] = sent, nodes[sent.node].last_activated_at

    def _greeting(self, site: str, challenge: str) -> RecordDict:
        return RecordDict(
            {
                RECORD: ConfigRecord(
                    {
                        "kind": "hello",
                        "run": self.run,
                        "round": self.round,
                        "site": site,
                        "description": self.description,
                        "challenge": challenge,
                    }
                )
            }
        )

    def _challenge_of(self, node: int, since: str) -> str:
        """What a node proves its token by: nobody else knows it, and the proof is of no use once
        the node was started anew."""
        return hmac.new(self._secret, f"{node} {since}".encode(), "sha256").hexdigest()

    def _answers(self) -> None:
        for sent, since in list(self._asked.values()):
            reply = self.post.pull(sent)
            if reply is not None:
                del self._asked[sent.id]
                self._take(reply, since)
            elif time.monotonic() - sent.at > self.settings.round_timeout:
                self._drop(sent)
                self._turn_away(sent.node, since, _AGAIN)

    def _take(self, reply: Reply, since: str) -> None:
        sent, config = reply.sent, reply.config
        site = sent.site or last_line(config.get("site"), 63)
        if reply.error or not config:
            # It may be about to end, or too busy to be in time; nothing says that it is another
            # model.
            self._turn_away(sent.node, since, _AGAIN)
            self.events.say(
                "failed",
                site=site,
                round=self.round,
                reason=reply.error or "an answer without words",
            )
            return
        samples, tests = _counts(reply)
        proof = config.get("proof")
        reason = self._objection(site, sent, config, samples, tests)
        there = Present(
            sent.node,
            since,
            samples,
            tests,
            time.monotonic(),
            proof if isinstance(proof, str) else None,
        )
        if reason is None:
            reason = self._taken(site, there) or self._no_token(site, there)
            if reason is not None:
                self._put_aside(site, there)
        if reason is not None:
            self._turn_away(sent.node, since)
            self.events.say("refused", site=site or str(sent.node), reason=reason)
            print(f"site {site or sent.node} is refused: {reason}", flush=True)
            return
        self._admit(site, there)

    def _admit(self, site: str, there: Present) -> None:
        self.present[site] = there
        self.events.say("greeted", site=site, samples=there.samples, tests=there.tests)

    def _objection(
        self, site: str, sent: Sent, config: Mapping[str, Any], samples: int, tests: int
    ) -> str | None:
        """Why a node that has answered takes no part; None where it does."""
        if config.get("status") != "ok":
            return last_line(config.get("reason"), 1000) or "it does not say why"
        if site not in self.names:
            return (
                f"it is called '{site}', and the run's sites are {', '.join(self.names)}; give "
                "it one of these names"
            )
        if sent.site and config.get("site") not in (None, sent.site):
            return (
                f"its key is that of '{sent.site}', and it calls itself "
                f"'{last_line(config.get('site'), 63)}'"
            )
        if samples < 0 or tests < 0:
            return "it does not say how many samples it has"
        return "it has no sample to train on" if samples == 0 else None

    def _taken(self, site: str, there: Present) -> str | None:
        other = self.present.get(site)
        if other is None or other.node == there.node:
            return None
        return f"another node is connected as '{site}'"

    def _put_aside(self, site: str, there: Present) -> None:
        self._turn_away(there.node, there.since)
        self._aside[there.node, there.since] = site, there

    def _no_token(self, site: str, there: Present) -> str | None:
        """What is wrong with a site's token; None where nothing is, or none is asked for. The file
        is read anew."""
        if self.tokens is None:
            return None
        return check_token(
            self.tokens, site, there.proof, self._challenge_of(there.node, there.since)
        )

    def _leave(self, site: str, reason: str) -> None:
        del self.present[site]
        self.events.say("left", site=site, reason=reason)

    def _drop(self, sent: Sent) -> None:
        del self._asked[sent.id]
        self.post.give_up(sent)

    def _turn_away(self, node: int, since: str, seconds: float = math.inf) -> None:
        self._met.add((node, since))
        self._turned_away[node, since] = time.monotonic() + seconds

    # ------------------------------------------------------------------ waiting

    def wait_for(self, minimum: int | None = None) -> None:
        """Until so many sites take part (None: those that a round needs), and those that have just
        come have answered.
        """
        needed, began = self.needed if minimum is None else minimum, time.monotonic()
        said = time.monotonic()
        while True:
            self.greet()
            self.post.sweep()
            now = time.monotonic()
            enough = len(self.present) >= needed
            # Nobody waits a second time for a node that has said nothing, or something wrong.
            new = [
                sent for sent, since in self._asked.values() if (sent.node, since) not in self._met
            ]
            if enough and not any(now - sent.at < _GREETING for sent in new):
                return
            over = not enough and now - began >= self.settings.wait
            if not enough and (over or now - said >= _SAY):
                said = now
                self._say_missing(needed, now - began)
            if over and self.settings.below == "stop":
                raise UserError(
                    f"round {self.round}: {len(self.present)} of the {needed} sites that a round "
                    f"needs are there after {self.settings.wait:g} s; missing: "
                    f"{', '.join(self.missing())}. Start them, or set sites.min lower, sites.wait "
                    "longer or sites.below=wait"
                )
            if over:
                began = now  # another time as long
            time.sleep(_INTERVAL if not over else min(_INTERVAL, max(self.settings.wait, 0.05)))

    def _say_missing(self, needed: int, seconds: float) -> None:
        missing = self.missing()
        self.events.say(
            "waiting", connected=len(self.present), missing=missing, needed=needed, seconds=seconds
        )
        print(
            f"waiting for sites, {len(self.present)} of {needed} are there; missing: "
            f"{', '.join(missing)} ({seconds:.0f} s)",
            flush=True,
        )


def _counts(reply: Reply) -> tuple[int, int]:
    """How many samples a site says that it has, to train on and to test on; -1 for what is no such
    number."""
    record = None if reply.content is None else reply.content.get("figures")
    figures = record if isinstance(record, MetricRecord) else {}

    def number(value: Any) -> int:
        fits = isinstance(value, (int, float)) and 0 <= value < 2**53 and value == int(value)
        return int(value) if fits else -1

    return number(figures.get("samples")), number(figures.get("tests", 0))
