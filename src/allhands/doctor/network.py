"""From what hosts told about names, interfaces and connections to findings."""

from __future__ import annotations

import ipaddress
from functools import partial
from typing import Any

from allhands.doctor.finding import Finding, size

Facts = dict[str, Any]
# Less than this part of what it should be is told.
FAIR_SHARE = 0.5


def own_name(host: str, facts: Facts) -> Finding:
    """What a host's own name means to itself. allhands chooses interfaces by routes, so no answer
    breaks its jobs."""
    result = partial(Finding, host, "names")
    name, told = facts["hostname"], facts["own_name"]
    values = {"hostname": name, "addresses": told["addresses"]}
    plain = "allhands names the interface to gloo itself; plain torchrun with gloo needs"
    if told["error"]:
        found = f"its own name {name} is not known there ({told['error']})"
        return result(
            "ok", found, f"{plain} GLOO_SOCKET_IFNAME, or a line for it in /etc/hosts", values
        )
    first = told["addresses"][0]
    found = f"its own name {name} is {', '.join(told['addresses'])}"
    if ipaddress.ip_address(first.partition("%")[0]).is_loopback:
        advice = (
            f"{plain} GLOO_SOCKET_IFNAME={_first_interface(facts)}, or an /etc/hosts in which "
            f"{name} is the network's address"
        )
        return result(
            "ok", f"{found}, which no other host can reach (Debian's default)", advice, values
        )
    return result("ok", found, values=values)


def _first_interface(facts: Facts) -> str:
    return str(next((one["name"] for one in facts["interfaces"]), "eth0"))


def other_names(host: str, told: dict[str, Any]) -> list[Finding]:
    """Which of the other hosts' names a host knows."""
    unknown = [name for name, answer in told.items() if answer["error"]]
    if not unknown:
        return []
    advice = (
        "allhands meets by address, so this is no harm to its jobs; MPI and torchrun with "
        "names need them in DNS or /etc/hosts"
    )
    return [
        Finding(
            host,
            "names",
            "ok",
            f"does not know the name{'s' * (len(unknown) > 1)} {', '.join(unknown)}",
            advice,
        )
    ]


def interface(host: str, facts: Facts, chosen: str | None, address: str | None) -> Finding:
    """The interface on the way to the other hosts; None where there are none or they are not
    reached."""
    result = partial(Finding, host, "network")
    all_of_them = facts["interfaces"]
    named = facts["variables"].get("GLOO_SOCKET_IFNAME")
    values = {"chosen": chosen, "address": address, "interfaces": all_of_them}
    told = [
        f"{one['name']} {', '.join(one['addresses'])} ({_speed(one)}, MTU {one['mtu']})"
        for one in all_of_them
    ]
    if chosen is None:
        if not all_of_them:
            return result(
                "ok", "no interface but the loopback: jobs of this machine only", values=values
            )
        return result("ok", "; ".join(told), values=values)
    mine = next((one for one in all_of_them if one["name"] == chosen), None)
    found = f"reaches the others by {chosen}, {address}" + (
        f" ({_speed(mine)}, MTU {mine['mtu']})" if mine else ""
    )
    others = [text for text, one in zip(told, all_of_them, strict=True) if one["name"] != chosen]
    if others:
        found += f"; it also has {'; '.join(others)}"
    if named and named != chosen:
        known = [one["name"] for one in all_of_them]
        if named.lstrip("=^").split(",")[0] not in known:
            advice = f"unset it, or set one of {', '.join(known)}"
            what = f"GLOO_SOCKET_IFNAME={named}, but there is no such interface"
            return result("problem", what, advice, values)
        found += f"; GLOO_SOCKET_IFNAME={named} is set and used"
    if mine and mine["speed"] and mine["speed"] < 1000:
        advice = (
            "a cable, a switch's port or autonegotiation is at fault, or it is the wrong network: "
            "`ethtool " + chosen + "`"
        )
        return result("warning", found, advice, values)
    advice = ""
    if others:
        advice = (
            "a faster network (InfiniBand, a second card) is used when the hosts are named by "
            "their addresses in it"
        )
    return result("ok", found, advice, values)


def _speed(one: dict[str, Any]) -> str:
    if one["speed"]:
        return f"{one['speed'] / 1000:g} Gbit/s"
    return "virtual" if one["virtual"] else "speed unknown"


def mtus(chosen: dict[str, dict[str, Any]]) -> list[Finding]:
    """Whether the interfaces that hosts use take packets of the same size. `chosen`: interface by
    host."""
    if len({one["mtu"] for one in chosen.values()}) < 2:
        return []
    what = "packets differ in size: " + ", ".join(
        f"{host} {one['name']} MTU {one['mtu']}" for host, one in chosen.items()
    )
    advice = (
        "set the same MTU on all hosts and on the switch (`ip link set dev NAME mtu N`), or "
        "large messages may hang"
    )
    return [Finding("", "network", "warning", what, advice)]


def ports(told: dict[tuple[str, str], dict[str, Any]], port: dict[str, int]) -> list[Finding]:
    """Who can connect to whom. `told`: for (from, to) what the probe said; `port`: where each one
    listened."""
    result = partial(Finding, "", "ports")
    findings = []
    for (source, target), answer in told.items():
        good = answer["reached"]
        if good is not None:
            continue
        tried = [f"{one['name']}: {one['error']}" for one in answer["tried"]]
        # Names that are unknown, or mean the host itself, explain nothing when an address was tried
        # as well.
        real = [
            one
            for one in answer["tried"]
            if one.get("address") and one["error"] != "that is this host itself"
        ]
        why = real[0]["error"] if real else "; ".join(tried)
        found = f"{source} cannot connect to {target} on port {port[target]} ({why})"
        if "timed out" in why:
            advice = f"a firewall on {target}, on {source} or between them drops it"
        elif (
            "refused" in why
            or "unreachable" in why
            or "route" in why
            or "prohibited" in why
            or "denied" in why
        ):
            advice = f"a firewall on {target} or between them refuses it, or the route is wrong"
        else:
            advice = f"give {target} a name or address that {source} knows"
        advice += (
            ". Workers meet on ports that the system chooses, in both directions: let the hosts of "
            "a job connect to one another on all ports (`ufw allow from ADDRESS`, `iptables -I "
            "INPUT -s ADDRESS -j ACCEPT`, or the cloud's security group). Tried: "
            f"{'; '.join(tried)}"
        )
        values = {"from": source, "to": target, "port": port[target], "tried": answer["tried"]}
        findings.append(result("problem", found, advice, values))
    if told and not findings:
        found = (
            f"every host connects to every other on a port that the system picked ({len(told)} "
            "directions)"
        )
        findings.append(result("ok", found))
    return findings


def link(told: dict[tuple[str, str], dict[str, float]], speed: int | None) -> Finding:
    """How fast plain sockets are, all hosts sending to the next one at the same time.

    Args:
        told: for (from, to) the bytes and seconds.
        speed: of the slowest interface in Mbit/s, None where that is not known of all.
    """
    result = partial(Finding, "", "link")
    rates = {pair: one["bytes"] / max(one["seconds"], 1e-6) for pair, one in told.items()}
    slowest = min(rates, key=lambda pair: rates[pair])
    values = {
        "gb_per_s": {f"{a} -> {b}": round(rate / 1e9, 4) for (a, b), rate in rates.items()},
        "link_gb_per_s": speed / 8e3 if speed else None,
    }
    found = (
        f"a socket carries {rates[slowest] / 1e9:.3g} GB/s both ways at the same time "
        f"({' -> '.join(slowest)}, the slowest)"
    )
    if not speed:
        return result("ok", f"{found}; the interfaces tell no speed", values=values)
    found += f"; the link is one of {speed / 8e3:.3g} GB/s"
    if rates[slowest] >= FAIR_SHARE * speed * 125e3:
        return result("ok", found, values=values)
    advice = (
        "others use it at the same time, the switch is slower than the cards, or a virtual "
        "machine's share is bounded; one socket alone also reaches 100 Gbit/s on few machines"
    )
    return result("warning", found, advice, values)


def should_give(speed: int | None, socket_rate: float | None) -> float | None:
    """Bytes a second that a link gives in each direction: its speed, or what a socket was measured
    to carry, if that is less."""
    known = [rate for rate in (speed * 125e3 if speed else None, socket_rate) if rate is not None]
    return min(known, default=None)


def all_reduce(told: dict[str, Any], ranks: int, hosts: int, link_rate: float | None) -> Finding:
    """The bandwidth of the real all-reduce against what the link should give.

    Each rank must send and receive 2 (n - 1) / n times the tensor, whatever the algorithm; so over
    a link that carries L bytes a second in each direction the algorithm bandwidth (bytes of the
    tensor / seconds) is at most L n / (2 (n - 1)).

    Args:
        told: rank 0's `backend`, and `sizes` with `bytes`, `seconds`.
        ranks: how many took part.
        hosts: on how many hosts.
        link_rate: L; None when all is on one host, or nothing is known.
    """
    result = partial(Finding, "", "all-reduce")
    rates = {one["bytes"]: one["bytes"] / one["seconds"] for one in told["sizes"]}
    largest = max(rates)
    expected = (
        link_rate * ranks / (2 * (ranks - 1)) if link_rate and ranks > 1 and hosts > 1 else None
    )
    values = {
        "ranks": ranks,
        "hosts": hosts,
        "backend": told["backend"],
        "correct": True,
        "sizes": [
            {**one, "gb_per_s": round(one["bytes"] / one["seconds"] / 1e9, 5)}
            for one in told["sizes"]
        ],
        "expected_gb_per_s": round(expected / 1e9, 5) if expected else None,
        **({"kinds": told["kinds"]} if "kinds" in told else {}),
    }
    if ranks == 1:
        found = (
            f"one worker ({told['backend']}) starts and ends well; alone it has nothing to "
            "exchange, so no bandwidth is told"
        )
        return result("ok", found, values={**values, "sizes": []})
    each = ", ".join(f"{size(one['bytes'])} in {_time(one['seconds'])}" for one in told["sizes"])
    found = (
        f"{ranks} workers ({told['backend']}), correct sums: {each}: "
        f"{rates[largest] / 1e9:.3g} GB/s"
    )
    if expected is None:
        if hosts == 1:
            where = "all on one host, so there is no link to compare with"
        else:
            where = "what the link should give is not known"
        return result("ok", f"{found}; {where}", values=values)
    found += f" of {expected / 1e9:.3g} GB/s that the link should give"
    if rates[largest] >= FAIR_SHARE * expected:
        return result("ok", found, values=values)
    advice = (
        "gloo needs a core's time for every byte: give workers more cores, or use GPUs with nccl. "
        "Look at the chosen interface and MTU above, at other jobs on these hosts, and whether "
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name a slower network"
    )
    return result("warning", found, advice, values)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
