"""What is said of names, interfaces, connections and bandwidths."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.doctor import network
from tests.doctor.facts import facts

SECOND = {"name": "ib0", "addresses": ["10.1.0.1"], "speed": 200000, "virtual": False, "mtu": 2044}


@pytest.mark.parametrize(
    ("told", "found", "advice"),
    [
        ({"addresses": ["10.0.0.1"], "error": None}, "its own name d1 is 10.0.0.1", ""),
        (
            {"addresses": ["127.0.1.1"], "error": None},
            "no other host can reach (Debian's default)",
            "GLOO_SOCKET_IFNAME=eth0",
        ),
        (
            {"addresses": [], "error": "Name or service not known"},
            "is not known there",
            "/etc/hosts",
        ),
    ],
)
def test_own_name_is_a_note_because_allhands_does_not_use_it(
    told: dict[str, Any], found: str, advice: str
) -> None:
    one = network.own_name("d1", facts(own_name=told))
    assert one.status == "ok"
    assert found in one.found
    assert advice in one.advice


def test_names_of_the_others() -> None:
    good, bad = {"addresses": ["10.0.0.2"], "error": None}, {"addresses": [], "error": "unknown"}
    assert network.other_names("d1", {"d2": good}) == []
    (one,) = network.other_names("d1", {"d2": good, "d3": bad, "d4": bad})
    assert one.found == "does not know the names d3, d4"


@pytest.mark.parametrize(
    ("changes", "chosen", "status", "found"),
    [
        ({}, "eth0", "ok", "reaches the others by eth0, 10.0.0.1 (10 Gbit/s, MTU 1500)"),
        ({}, None, "ok", "eth0 10.0.0.1 (10 Gbit/s, MTU 1500)"),
        ({"interfaces": []}, None, "ok", "no interface but the loopback"),
        (
            {"interfaces": [facts()["interfaces"][0], SECOND]},
            "eth0",
            "ok",
            "it also has ib0 10.1.0.1 (200 Gbit/s, MTU 2044)",
        ),
        ({"interfaces": [{**SECOND, "speed": 100}]}, "ib0", "warning", "0.1 Gbit/s"),
        ({"interfaces": [{**SECOND, "speed": None}]}, "ib0", "ok", "speed unknown"),
        (
            {"variables__GLOO_SOCKET_IFNAME": "eth7"},
            "eth0",
            "problem",
            "GLOO_SOCKET_IFNAME=eth7, but there is no such interface",
        ),
        (
            {
                "variables__GLOO_SOCKET_IFNAME": "ib0",
                "interfaces": [facts()["interfaces"][0], SECOND],
            },
            "eth0",
            "ok",
            "GLOO_SOCKET_IFNAME=ib0 is set and used",
        ),
    ],
)
def test_interface(changes: dict[str, Any], chosen: str | None, status: str, found: str) -> None:
    one = network.interface("d1", facts(**changes), chosen, "10.0.0.1" if chosen else None)
    assert one.status == status
    assert found in one.found
    assert one.values["chosen"] == chosen


def test_packets_of_another_size() -> None:
    chosen = {"d1": {"name": "eth0", "mtu": 9000}, "d2": {"name": "eth0", "mtu": 9000}}
    assert network.mtus(chosen) == []
    (one,) = network.mtus({**chosen, "d3": {"name": "eth1", "mtu": 1500}})
    assert one.status == "warning"
    assert "d1 eth0 MTU 9000, d2 eth0 MTU 9000, d3 eth1 MTU 1500" in one.found


def reached(address: str) -> dict[str, Any]:
    one = {
        "name": address,
        "address": address,
        "own": "10.0.0.9",
        "interface": "eth0",
        "error": None,
    }
    return {"reached": one, "tried": [one]}


def refused(*errors: tuple[str, str, str]) -> dict[str, Any]:
    return {
        "reached": None,
        "tried": [
            {"name": name, "address": address, "error": error} for name, address, error in errors
        ],
    }


def test_all_ports_open() -> None:
    (one,) = network.ports(
        {("d1", "d2"): reached("10.0.0.2"), ("d2", "d1"): reached("10.0.0.1")}, {"d1": 1, "d2": 2}
    )
    assert one.status == "ok"
    assert "2 directions" in one.found
    assert network.ports({}, {}) == []


@pytest.mark.parametrize(
    ("tried", "why", "advice"),
    [
        (
            [("d1", "10.0.0.1", "timed out")],
            "timed out",
            "a firewall on d1, on d2 or between them drops it",
        ),
        ([("d1", "10.0.0.1", "Connection refused")], "Connection refused", "refuses it"),
        ([("d1", "10.0.0.1", "No route to host")], "No route to host", "the route is wrong"),
        (
            [("d1", "10.0.0.1", "something else answers there")],
            "something else answers there",
            "that d2 knows",
        ),
        (
            [
                ("d1", "127.0.0.1", "that is this host itself"),
                ("10.0.0.1", "10.0.0.1", "timed out"),
            ],
            "timed out",
            "Tried: d1: that is this host itself; 10.0.0.1: timed out",
        ),
        (
            [("d1", "", "the name is not known (x)")],
            "d1: the name is not known (x)",
            "that d2 knows",
        ),
    ],
)
def test_a_blocked_direction_is_named(
    tried: list[tuple[str, str, str]], why: str, advice: str
) -> None:
    told = {("d1", "d2"): reached("10.0.0.2"), ("d2", "d1"): refused(*tried)}
    (one,) = network.ports(told, {"d1": 40001, "d2": 40002})
    assert one.status == "problem"
    assert one.found == f"d2 cannot connect to d1 on port 40001 ({why})"
    assert advice in one.advice


@pytest.mark.parametrize(("speed", "status"), [(None, "ok"), (10000, "ok"), (25000, "warning")])
def test_a_socket_against_the_link(speed: int | None, status: str) -> None:
    told = {
        ("d1", "d2"): {"bytes": 6e8, "seconds": 0.5},
        ("d2", "d1"): {"bytes": 4e8, "seconds": 0.5},
    }
    # 0.8 GB/s in the slower direction; the links carry 1.25 and 3.125 GB/s.
    one = network.link(told, speed)
    assert one.status == status
    assert "0.8 GB/s both ways at the same time (d2 -> d1, the slowest)" in one.found
    assert one.values["gb_per_s"] == {"d1 -> d2": 1.2, "d2 -> d1": 0.8}
    assert one.values["link_gb_per_s"] == (speed / 8000 if speed else None)


def test_what_a_link_should_give() -> None:
    assert network.should_give(None, None) is None
    assert network.should_give(10000, None) == 1.25e9
    assert network.should_give(10000, 0.8e9) == 0.8e9
    assert network.should_give(1000, 0.8e9) == 0.125e9
    assert network.should_give(None, 0.8e9) == 0.8e9


def reduced(seconds: float) -> dict[str, Any]:
    return {
        "backend": "gloo",
        "sizes": [{"bytes": 4096, "seconds": 0.001}, {"bytes": 100_000_000, "seconds": seconds}],
    }


@pytest.mark.parametrize(
    ("seconds", "ranks", "expected", "status"),
    [
        (0.1, 2, 1.25, "ok"),  # 1 GB/s over 1.25 GB/s: two ranks send each byte once
        (0.2, 2, 1.25, "warning"),  # 0.5 of 1.25
        (0.2, 4, 0.83333, "ok"),  # four ranks send each byte one and a half times
        (0.25, 4, 0.83333, "warning"),
    ],
)
def test_an_all_reduce_against_the_link(
    seconds: float, ranks: int, expected: float, status: str
) -> None:
    one = network.all_reduce(reduced(seconds), ranks, 2, 1.25e9)
    assert one.status == status
    assert one.values["expected_gb_per_s"] == expected
    assert one.values["sizes"][1] == {
        "bytes": 100_000_000,
        "seconds": seconds,
        "gb_per_s": round(0.1 / seconds, 5),
    }
    assert f"{0.1 / seconds:.3g} GB/s of" in one.found


def test_an_all_reduce_without_a_link() -> None:
    one = network.all_reduce(reduced(0.1), 2, 1, None)
    assert one.status == "ok"
    assert "all on one host" in one.found
    assert "not known" in network.all_reduce(reduced(0.1), 2, 2, None).found
    one = network.all_reduce(reduced(0.1), 1, 1, None)
    assert "GB/s" not in one.found
    assert one.values["sizes"] == []
