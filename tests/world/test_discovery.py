from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from allhands.errors import WorldError
from allhands.world import discovery
from tests.patience import patience

HERE = ["127.0.0.1"]


@pytest.fixture
def same_ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All jobs draw the same candidate ports."""
    ports = discovery.candidate_ports(f"test {time.time_ns()}")
    monkeypatch.setattr(discovery, "candidate_ports", lambda job_key: ports)
    return ports


@contextlib.contextmanager
def foreign_service(port: int, say: bytes | None) -> Iterator[None]:
    """Something else on `port`: answers `say` to everybody, or accepts and keeps silent."""
    held = []
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if say is None:
                        held.append(connection)
                        continue
                    with connection:
                        connection.sendall(say)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for connection in held:
            connection.close()


def test_candidates_depend_on_the_job_alone() -> None:
    assert discovery.candidate_ports("a") == discovery.candidate_ports("a")
    assert discovery.candidate_ports("a") != discovery.candidate_ports("b")
    assert all(1024 < port < 32768 for port in discovery.candidate_ports("a"))


def test_tells_the_port_whoever_comes_first() -> None:
    found: list[tuple[str, int]] = []
    early = threading.Thread(target=lambda: found.append(discovery.ask("early", HERE, 10)))
    early.start()
    time.sleep(0.2)
    server = discovery.DiscoveryServer("early", 4242, local=True)
    early.join(10)
    assert found == [("127.0.0.1", 4242)]
    assert discovery.ask("early", HERE, 10) == ("127.0.0.1", 4242)
    server.close()
    server.close()


def test_jobs_on_colliding_ports_find_their_own(same_ports: list[int]) -> None:
    first, second = (
        discovery.DiscoveryServer("job 1", 1111, local=True),
        discovery.DiscoveryServer("job 2", 2222, local=True),
    )
    assert (first.port, second.port) == (same_ports[0], same_ports[1])
    assert discovery.ask("job 1", HERE, 10)[1] == 1111
    assert discovery.ask("job 2", HERE, 10)[1] == 2222
    first.close()
    second.close()


@pytest.mark.parametrize(
    "say", [b"SSH-2.0-OpenSSH_9.2\r\n", b"", b"x" * 5000, b"0" * 64 + b" 99\n", None]
)
def test_a_foreign_service_is_passed_over(
    same_ports: list[int], say: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_ANSWER_S", 0.3)
    with foreign_service(same_ports[0], say):
        server = discovery.DiscoveryServer("job", 4242, local=True)
        assert server.port == same_ports[1]
        assert discovery.ask("job", HERE, 10) == ("127.0.0.1", 4242)
        server.close()


def test_a_silent_caller_does_not_keep_the_ranks_waiting() -> None:
    server = discovery.DiscoveryServer("busy", 4242, local=True)
    with socket.create_connection(("127.0.0.1", server.port)):
        started = time.monotonic()
        assert discovery.ask("busy", HERE, 10)[1] == 4242
        assert time.monotonic() - started < patience(1)
    server.close()


def test_rank_0_may_be_on_any_host_of_the_step() -> None:
    server = discovery.DiscoveryServer("dealt out", 4242, local=True)
    assert discovery.ask("dealt out", ["127.0.0.2", "127.0.0.3", "127.0.0.1"], 10) == (
        "127.0.0.1",
        4242,
    )
    server.close()


def test_nobody_there_is_an_error_in_time_that_says_what_was_met(same_ports: list[int]) -> None:
    with foreign_service(same_ports[0], b"hello\n"):
        started = time.monotonic()
        with pytest.raises(
            WorldError,
            match=rf"waited 1 s for rank 0 on 127.0.0.1.*{same_ports[0]}: another service",
        ):
            discovery.ask("job", HERE, 1)
        assert time.monotonic() - started < patience(3)


def test_an_unknown_host_is_an_error_in_time() -> None:
    with pytest.raises(WorldError, match=r"cannot reach no-such-host\.invalid"):
        discovery.ask("job", ["no-such-host.invalid"], 0.5)


def test_all_ports_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(discovery, "candidate_ports", lambda job_key: [taken.getsockname()[1]])
        with pytest.raises(WorldError, match="could listen on none of the ports"):
            discovery.DiscoveryServer("job", 1, local=True)
