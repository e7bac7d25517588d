"""`Sites`: how a federated training across real sites waits, and what it does about sites that are
missing, slow or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allhands.checks import check_choice, check_whole, is_number
from allhands.errors import UserError

BELOW = ("stop", "wait")
ON_BAD = ("skip", "stop")


@dataclass(frozen=True)
class Sites:
    """Settings of a run across sites; a simulation reads only how many there are.

    Args:
        names: of all sites, in the order of the clients: the first is client 0. None: those of the
            allow list, in its order.
        min: sites that must be connected before a round begins; None: all of them.
        wait: seconds for which the server waits for so many, before the first round and before each
            other one. Those that are missing are named every 10 seconds.
        below: what comes after that: "stop" ends the run and names them; "wait" goes on waiting.
        round_timeout: seconds that a site has for its part of a round; what comes later is named,
            counted and left out.
        on_bad: what becomes of an update that is refused (NaN, another shape, an absurd norm):
            "skip" leaves the site out of the round, "stop" ends the run; both name it.
        max_norm: an update of a larger L2 norm is refused; None: one of more than 10 times the
            median of those that were accepted in this round and the last one, in proportion to the
            steps of a site that takes more; as long as there are not three, one of more than 1000
            times the model's own norm, or 1000.
        labels: names of the classes, which each site compares with its own; None: not compared.

    Raises:
        UserError: a value out of its bounds.
    """

    names: Sequence[str] | None = None
    min: int | None = None
    wait: float = 600.0
    below: str = "stop"
    round_timeout: float = 3600.0
    on_bad: str = "skip"
    max_norm: float | None = None
    labels: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("names", "labels"):
            self._check_names(name, getattr(self, name))
        check_whole("sites.min", self.min, otherwise="null for all sites")
        self._check_min(None if self.names is None else len(self.names))
        for name in ("wait", "round_timeout", "max_norm"):
            value = getattr(self, name)
            if value is None and name == "max_norm":
                continue
            if not is_number(value) or not value >= 0 or (value == 0 and name != "wait"):
                what = "of at least 0" if name == "wait" else "above 0"
                raise UserError(
                    f"sites.{name}={value!r}; it must be a number "
                    f"{what}{', or null' if name == 'max_norm' else ''}"
                )
        for name, known in (("below", BELOW), ("on_bad", ON_BAD)):
            check_choice(f"sites.{name}", getattr(self, name), known)

    @staticmethod
    def _check_names(what: str, given: Sequence[str] | None) -> None:
        if given is None:
            return
        if (
            isinstance(given, str)
            or not all(isinstance(name, str) and name for name in given)
            or not given
        ):
            raise UserError(
                f"sites.{what}={given!r}; it must be a list of names, such as [north, south], or "
                "null"
            )
        twice = [name for name in given if list(given).count(name) > 1]
        if twice:
            raise UserError(f"sites.{what} has {twice[0]!r} twice; write each name once")

    def _check_min(self, sites: int | None) -> None:
        if sites is not None and self.min is not None and self.min > sites:
            raise UserError(
                f"sites.min={self.min} of {sites} sites; write at most {sites}, or null for all of "
                "them"
            )

    def of(self, names: Sequence[str]) -> int:
        """Sites that must be connected, of the sites of a run.

        Raises:
            UserError: there are fewer than `min`.
        """
        self._check_min(len(names))
        return self.min if self.min is not None else len(names)

    def check_clients(self, clients: int) -> None:
        """Raise `UserError` unless a simulation has as many clients as there are names of sites."""
        if self.names is not None and len(self.names) != clients:
            raise UserError(
                f"sites.names are {len(self.names)} sites and the run has {clients} clients; write "
                f"clients={len(self.names)}, or as many names as there are clients"
            )
