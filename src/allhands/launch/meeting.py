"""Opens the store of a round on the first host, and finds out how each host reaches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allhands.errors import HostError
from allhands.launch.agent_group import AgentGroup
from allhands.launch.job_nodes import ranks_of
from allhands.launch.plan import HostPart

LOOPBACK = "127.0.0.1"
# What gloo, nccl and TensorPipe read to find the interface; a variable that the user has set
# stands.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class StorePlace:
    """Where the processes of one round meet.

    Attributes:
        port: of the store.
        addresses: of its host, that which others reach first.
        local: the address for processes of that host.
    """

    port: int
    addresses: Sequence[str]
    local: str


def meet(
    agents: AgentGroup,
    shares: Sequence[tuple[int, Sequence[int]]],
    open_to_all: bool,
    say: Callable[[str], None],
) -> tuple[StorePlace, list[HostPart]]:
    """Open the store, and give each host its part of the job.

    Args:
        agents: of the hosts, the first of which has the store.
        shares: the workers of each host, and the numbers of its servers.
        open_to_all: other hosts may come later.
        say: shows who meets where.

    Raises:
        HostError: a host does not reach the first one.
    """
    first, others = agents.agents[0], agents.agents[1:]
    first.send(op="store", address="" if others or open_to_all else LOOPBACK)
    store = agents.wait_for("store", [first])[0]
    port = int(store["port"])
    known: list[str] = store["addresses"]
    if not others:
        own = known[0] if open_to_all and known else LOOPBACK
        return StorePlace(port, [*known, first.host], own), [HostPart(*shares[0], own)]
    for agent in others:
        agent.send(
            op="reach", addresses=list(dict.fromkeys([*known[:1], first.host, *known])), port=port
        )
    told = agents.wait_for("reached", others)
    for agent, answer in zip(others, told, strict=True):
        if answer["address"] is None:
            raise unreached(agent.host, first.host, answer["tried"])
    addresses = [told[0]["address"], *(answer["own"] for answer in told)]
    interfaces = [
        store["interfaces"].get(told[0]["address"]),
        *(answer["interface"] for answer in told),
    ]
    meeting = [told[0]["address"], *(answer["address"] for answer in told)]
    places, rank, words = [], 0, []
    for index, (workers, servers) in enumerate(shares):
        interface = interfaces[index]
        defaults = dict.fromkeys(INTERFACE_VARIABLES, interface) if interface else {}
        place = HostPart(workers, servers, meeting[index], defaults)
        places.append(place)
        about = f"{addresses[index]}, {interface or 'no interface of its own'}"
        words.append(f"{agents.agents[index].host} ({about}) {ranks_of(rank, place)}")
        rank += workers
    say(
        f"{rank} workers on {len(shares)} hosts: {'; '.join(words)}; they meet at "
        f"{meeting[0]}:{port}"
    )
    return StorePlace(
        port, list(dict.fromkeys([meeting[0], *known, first.host])), meeting[0]
    ), places


def unreached(host: str, first: str, tried: Sequence[str]) -> HostError:
    """The error for a host that does not reach the first one; `tried` is what happened at each of
    its addresses."""
    return HostError(
        host,
        f"it reaches {first} under none of its addresses ({'; '.join(tried)}). Workers talk to one "
        "another on ports that the system chooses: open the firewall between the hosts; `allhands "
        "doctor -H …` tests every pair",
    )
