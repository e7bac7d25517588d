"""Clients' devices in virtual time: how fast they are, when they can be had, and who comes back in
time. Nobody sleeps.

All of it follows from profiles and from (seed, round, client), before anything is trained; so
clients that come too late, or not at all, are not trained.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allhands.data import derive_seed
from allhands.errors import UserError
from allhands.federated.algorithms.base import fraction
from allhands.federated.clients import Clients
from allhands.federated.local_training import LocalTraining
from allhands.federated.update_compression import Traffic

_TRIES = 100  # clients looked at for each one that is wanted, before a round goes on with fewer


@dataclass(frozen=True)
class Trip:
    """A client's part in a round.

    Attributes:
        seconds: until its update has arrived or, where it drops out, until it is gone.
        client: who.
        arrives: whether the update does.
    """

    seconds: float
    client: int
    arrives: bool


class Distribution:
    """A number for each client, which depends on the seed and the client only.

    Args:
        what: the option that it is the value of, for messages.
        given: a number for all; a list with one number a client; ``{"name": "lognormal", "median":
            …, "sigma": …}``; ``{"name": "table", "values": […]}``, one of which is drawn for each
            client.
        low, high: bounds of each number.
        open_low: whether `low` itself is out of bounds.
    """

    def __init__(
        self,
        what: str,
        given: Any,
        low: float = 0.0,
        high: float = math.inf,
        *,
        open_low: bool = False,
    ) -> None:
        self.what = what
        self.values: list[float] | None = None
        self.sigma = 0.0
        self.own = False

        def number(value: Any) -> float:
            return fraction(f"systems: {what}", value, low, high, open_low=open_low)

        if (
            isinstance(given, dict)
            and given.get("name") == "lognormal"
            and set(given) == {"name", "median", "sigma"}
        ):
            self.median = fraction(f"systems: {what}: median", given["median"], open_low=True)
            self.sigma = fraction(f"systems: {what}: sigma", given["sigma"])
            if high < math.inf:
                raise UserError(
                    f"systems: {what}={given!r} has no upper bound; write a number, a list or a "
                    "table"
                )
        elif (
            isinstance(given, dict)
            and given.get("name") == "table"
            and set(given) == {"name", "values"}
            and given["values"]
        ):
            self.values = [number(value) for value in given["values"]]
        elif isinstance(given, (list, tuple)) and given:
            self.values, self.own = [number(value) for value in given], True
        elif isinstance(given, (int, float)):
            self.median = number(given)
        else:
            raise UserError(
                f"systems: {what}={given!r}; it must be a number, a list with one number a client, "
                f"{{'name': "
                "'lognormal', 'median': …, 'sigma': …}, or {'name': 'table', 'values': […]}"
            )

    def check(self, clients: int) -> None:
        """Raise `UserError` where there is a list, and not for so many clients."""
        if self.own and self.values is not None and len(self.values) != clients:
            raise UserError(
                f"systems: {self.what} has {len(self.values)} numbers for {clients} clients; write "
                "one a client"
            )

    def of(self, client: int, seed: int) -> float:
        """The number of a client."""
        if self.own and self.values is not None:
            return self.values[client]
        if self.values is None and not self.sigma:
            return self.median
        drawn = random.Random(derive_seed(seed, "systems", self.what, client))
        if self.values is not None:
            return drawn.choice(self.values)
        return self.median * math.exp(drawn.gauss(0.0, self.sigma))


class Systems:
    """Profiles of clients' devices, the clock, and the rule by which a round ends.

    A client's time is download + training + upload + `delay`. A round ends when all that were
    selected have arrived or dropped out; with `over_selection`, when as many as `per_round` have
    arrived; and at the deadline at the latest.

    Each profile is a number for all, a list with one number a client, or drawn for each client: see
    `Distribution`.

    Args:
        speed: samples a second in training; None: training takes no time.
        download, upload: bytes a second; None: no time.
        delay: further seconds a round.
        dropout: the probability that a client goes away in a round, at a moment drawn from its
            time.
        availability: ``{"period": seconds, "share": 0 to 1}``: a client can be had for that share
            (a profile) of each period, from a moment that is drawn for it; one whose window closes
            before it has arrived drops out. None: always.
        deadline: seconds of a round; what arrives later is lost. None: none.
        over_selection: how many more clients are selected, as a part of `per_round`: 0.3 for 30
            percent.

    Attributes:
        now: the clock, seconds from the beginning of the run.
        opens: seconds until the first of those whom the last `draw` has looked at can be had;
            infinite when it looked at nobody.
        arrived, late, dropped: clients of the round, as in the history.

    Raises:
        UserError: an option out of its bounds.
    """

    def __init__(
        self,
        speed: Any = None,
        download: Any = None,
        upload: Any = None,
        delay: Any = 0.0,
        dropout: Any = 0.0,
        availability: dict[str, Any] | None = None,
        deadline: float | None = None,
        over_selection: float = 0.0,
    ) -> None:
        def profile(what: str, given: Any, **bounds: Any) -> Distribution | None:
            return None if given is None else Distribution(what, given, **bounds)

        self.speed = profile("speed", speed, open_low=True)
        self.download = profile("download", download, open_low=True)
        self.upload = profile("upload", upload, open_low=True)
        self.delay = Distribution("delay", delay)
        self.dropout = Distribution("dropout", dropout, high=1.0)
        self.deadline = (
            None if deadline is None else fraction("systems: deadline", deadline, open_low=True)
        )
        self.over_selection = fraction("systems: over_selection", over_selection)
        self.share: Distribution | None = None
        if availability is not None:
            if not isinstance(availability, dict) or set(availability) != {"period", "share"}:
                raise UserError(
                    f"systems: availability={availability!r}; write {{'period': seconds, 'share': "
                    f"0.5}}"
                )
            self.period = fraction(
                "systems: availability: period", availability["period"], open_low=True
            )
            self.share = Distribution(
                "availability: share", availability["share"], high=1.0, open_low=True
            )
        #: Whether who takes part is decided by devices, and not by the draw of the cohort alone.
        self.selects = (
            availability is not None
            or deadline is not None
            or bool(self.over_selection)
            or dropout != 0
        )
        #: Whether it draws the cohorts.
        self.draws = availability is not None or bool(self.over_selection)
        self.now, self.opens = 0.0, math.inf
        self.arrived: list[int] = []
        self.late: list[int] = []
        self.dropped: list[int] = []

    def begin(
        self, clients: Clients, local: LocalTraining, traffic: Traffic, seed: int, per_round: int
    ) -> None:
        """Know the clients; called once, before the first round.

        Raises:
            UserError: a list is not one number a client, or more clients would be selected than
                there are.
        """
        self.clients, self.local, self.traffic, self.seed = clients, local, traffic, seed
        self.now = 0.0  # the same object may serve another run
        for profile in (
            self.speed,
            self.download,
            self.upload,
            self.delay,
            self.dropout,
            self.share,
        ):
            if profile is not None:
                profile.check(len(clients))
        if self.wanted(per_round) > len(clients):
            raise UserError(
                f"systems: over_selection={self.over_selection:g} of per_round={per_round} selects "
                f"{self.wanted(per_round)} of {len(clients)} clients; write at most "
                f"over_selection={len(clients) / per_round - 1:.2g}, or a smaller per_round"
            )

    def wanted(self, per_round: int) -> int:
        """Clients that are selected for a round."""
        return math.ceil(per_round * (1 + self.over_selection) - 1e-9)

    # ------------------------------------------------------------------ one client

    def window(self, client: int, now: float) -> tuple[float, float]:
        """Seconds from `now` until a client can be had, 0 if it can, and from `now` until it cannot
        any more."""
        if self.share is None:
            return 0.0, math.inf
        length = self.share.of(client, self.seed) * self.period
        if length >= self.period:
            return 0.0, math.inf
        phase = random.Random(derive_seed(self.seed, "phase", client)).random() * self.period
        place = (now + phase) % self.period
        if place < length:
            return (0.0, length - place)
        return (self.period - place, self.period - place + length)

    def trip(self, client: int, round_: int, now: float) -> Trip:
        """A client's part in a round that begins for it at `now`."""
        seconds = self.delay.of(client, self.seed)
        for amount, rate in (
            (self.traffic.down, self.download),
            (self.traffic.up, self.upload),
            (self.local.num_seen(self.clients.size(client)), self.speed),
        ):
            if rate is not None:
                seconds += amount / rate.of(client, self.seed)
        closes, chance = self.window(client, now)[1], self.dropout.of(client, self.seed)
        if chance:
            drawn = random.Random(derive_seed(self.seed, "dropout", round_, client))
            if drawn.random() < chance:
                return Trip(min(drawn.random() * seconds, closes), client, False)
        return Trip(closes, client, False) if seconds > closes else Trip(seconds, client, True)

    # ------------------------------------------------------------------ rounds

    def draw(self, number: int, taken: Collection[int], *purpose: str | int) -> list[int]:
        """Clients that can be had now, drawn without repetition, in the order of the draw; fewer
        than `number`, or none, where few can. The cost is that of the clients looked at.

        Args:
            number: how many.
            taken: who is not drawn.
            purpose: what the draw depends on, beside the seed.
        """
        drawn = random.Random(derive_seed(self.seed, *purpose))
        most = min(len(self.clients), _TRIES * number + len(taken))
        found: list[int] = []
        looked: set[int] = set()
        self.opens = math.inf
        while len(found) < number and len(looked) < most:
            client = drawn.randrange(len(self.clients))
            if client not in looked and client not in taken:
                opens, _ = self.window(client, self.now)
                self.opens = min(self.opens, opens)
                if opens == 0.0:
                    found.append(client)
            looked.add(client)
        return found

    def select(self, per_round: int, round_: int) -> list[int]:
        """The cohort: clients that can be had when the round begins. Where nobody can, the clock
        goes on until somebody can."""
        while not (found := self.draw(self.wanted(per_round), (), "cohort", round_)):
            self.wait()
        return sorted(found)

    def wait(self) -> None:
        """Let the clock go on to where the first of those whom `draw` has looked at can be had."""
        self.now += max(self.opens, 1e-6 * self.period)  # beyond rounding

    def run(self, cohort: list[int], round_: int, per_round: int) -> list[int]:
        """Those of a cohort that arrive in time, by number; the clock goes on to the end of the
        round."""
        trips = sorted(
            (self.trip(client, round_, self.now) for client in cohort),
            key=lambda trip: (trip.seconds, trip.client),
        )
        limit = math.inf if self.deadline is None else self.deadline
        most = per_round if self.over_selection else len(cohort)
        back = [trip for trip in trips if trip.arrives]
        kept = [trip for trip in back if trip.seconds <= limit][:most]
        enough = bool(self.over_selection) and len(kept) == most
        end = kept[-1].seconds if enough else min(limit, trips[-1].seconds if trips else 0.0)
        self.now += end
        self.arrived = sorted(trip.client for trip in kept)
        self.late = sorted(trip.client for trip in back[len(kept) :])
        self.dropped = sorted(trip.client for trip in trips if not trip.arrives)
        return self.arrived

    def note(self, history: dict[str, Any], clients: Clients) -> None:
        """A round's line in the history."""
        before = history["virtual_time"][-1] if history["virtual_time"] else 0.0
        history["virtual_time"].append(self.now)
        history["virtual_seconds"].append(self.now - before)
        for name in ("arrived", "late", "dropped"):
            history[name].append(clients.called(getattr(self, name)))


#: What `Systems.note` adds to.
NOTED = ("virtual_time", "virtual_seconds", "arrived", "late", "dropped")


def coala_delays(
    kind: str,
    clients: int,
    seed: int,
    *,
    level: int = 3,
    total_time: float = 1000.0,
    groups: int = 1000,
    fraction: float = 1.0,
    speeds: Sequence[float] | None = None,
) -> list[float]:
    """Seconds by which clients are late, for `Systems(delay=…)`, from the settings of COALA's
    `resource_heterogeneous`, whose clients sleep for them.

    Args:
        kind: "iso": evenly spaced; "dir": drawn from a symmetric Dirichlet distribution; "real":
            drawn from `speeds`.
        clients: how many.
        seed: decides the draws, and who gets which.
        level: 0 (all alike) to 5; "iso" spaces from 0.5 - level / 10 to 0.5 + level / 10, "dir" has
            a concentration of 1 / level**2.
        total_time: seconds of all clients together.
        groups: how many different values; clients of a group share one.
        fraction: the part of the clients that is late at all.
        speeds: relative seconds of real devices.

    Returns:
        One number a client.

    Raises:
        UserError: an option out of its bounds, or "real" without speeds.
    """
    late = int(fraction * clients)
    if kind not in ("iso", "dir", "real"):
        raise UserError(f"hetero_type={kind!r}; it must be 'iso', 'dir' or 'real'")
    if not isinstance(level, int) or not 0 <= level <= 5:
        raise UserError(f"level={level!r}; it must be a whole number from 0 to 5")
    if late < 1 or fraction > 1 or groups < 1:
        raise UserError(
            f"fraction={fraction!r} of {clients} clients in {groups} groups; it must leave at "
            "least one of each"
        )
    if kind == "real" and level and not speeds:
        raise UserError(
            "hetero_type='real' draws from speeds of real devices, and there are none here; give "
            "speeds=[…], or set hetero_type to 'dir' or 'iso'"
        )
    drawn, groups = np.random.default_rng(derive_seed(seed, "delays")), min(groups, late)
    if not level:
        values = np.ones(groups)
    elif kind == "iso":
        values = np.linspace(0.5 - level / 10, 0.5 + level / 10, groups, endpoint=False)
    elif kind == "dir":
        values = drawn.dirichlet(np.full(groups, 1 / level**2))
    else:
        values = drawn.choice(np.asarray(speeds, dtype=np.float64), groups)
    each = np.zeros(clients)
    each[:late] = values[np.arange(late) * groups // late]
    each = drawn.permutation(each)
    if each.sum() <= 0:
        raise UserError(
            f"hetero_type={kind!r} with level={level} leaves one client without a delay to scale; "
            f"set level to {max(level - 1, 0)}"
        )
    return [float(value) for value in each / each.sum() * total_time]
