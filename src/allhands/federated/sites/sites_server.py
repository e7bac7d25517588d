"""`allhands federated server`: a SuperLink that runs our ServerApp, from start to end."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allhands import wire
from allhands.errors import UserError
from allhands.federated.sites import flower
from allhands.federated.sites.certificates import names_of, read_certificates
from allhands.federated.sites.control import Control, Unanswered
from allhands.federated.sites.server_process import LOG, PID, RUN_ID, STATE
from allhands.federated.sites.supervision import SECRET, alone, spawn, write_secretly
from allhands.launch import processes

#: The file of the state folder from which the ServerApp knows what to run.
SETTINGS = "server.json"
# Seconds: until the SuperLink listens; for the ServerApp to abandon its round; between two looks at
# the run; without an answer.
_START, _GRACE, _EVERY, _SILENCE = 60.0, 20.0, 1.0, 120.0


@dataclass(frozen=True)
class ServerOptions:
    """What `allhands federated server` was asked for; the files are absolute.

    Attributes:
        config: the run files.
        overrides: changes to them, ``key=value``.
        host: the address that sites connect to is one of this machine's; "0.0.0.0" listens on all.
        port: Flower's one port.
        state: the folder for what outlives a restart, except for what training writes into the
            logdir.
        certificate, key, authority: the server's certificate, its key and the authority's
            certificate; None: insecure.
        sites: the allow list; None: no key is checked.
        tokens: the file of the sites' tokens.
        data: where the server's own data are, for evaluation.
        page: the port of loopback at which the run is shown; None: it is not.
    """

    config: Sequence[Path]
    overrides: Sequence[str]
    host: str
    port: int
    state: Path
    certificate: Path | None
    key: Path | None
    authority: Path | None
    sites: Path | None
    tokens: Path | None
    data: Path | None
    page: int | None = None

    @property
    def insecure(self) -> bool:
        return self.certificate is None


def own_host(options: ServerOptions) -> str:
    """The name or address by which the server's own processes reach its port: one that its
    certificate is for."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(
        options.host, options.host
    )
    if options.certificate is None:
        return host
    names = names_of(
        read_certificates(options.certificate, "the server's certificate (--certificate)")[0]
    )
    if host in names:
        return host
    if "localhost" in names and ipaddress.ip_address(host).is_loopback:
        return "localhost"
    plain = [name for name in names if "*" not in name]
    if not plain:
        raise UserError(
            f"the certificate {options.certificate} names no host that the server's own processes "
            f"could use; make one that names {host} or localhost too"
        )
    return plain[0]


def address(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def commands(options: ServerOptions) -> dict[str, list[str]]:
    """The processes that run, by name: those that the server starts itself."""
    tls = ["--insecure"]
    if not options.insecure:
        tls = [
            "--ssl-certfile",
            str(options.certificate),
            "--ssl-keyfile",
            str(options.key),
            "--ssl-ca-certfile",
            str(options.authority),
            "--enable-supernode-auth",
        ]
    secret = ["--superexec-auth-secret-file", str(options.state / SECRET)]
    trust = ["--insecure"] if options.insecure else ["--root-certificates", str(options.authority)]
    return {
        "superlink": [
            sys.executable,
            "-P",
            "-m",
            "allhands.federated.sites.superlink",
            *tls,
            "--host",
            options.host,
            "--port",
            str(options.port),
            "--isolation",
            "process",
            *secret,
            "--disable-runtime-dependency-installation",
            "--database",
            str(options.state / "superlink.db"),
            "--log-file",
            str(options.state / "superlink.log"),
        ],
        "superexec": [
            flower.command("flower-superexec"),
            "--runtime-api-address",
            address(own_host(options), options.port),
            *trust,
            *secret,
        ],
    }


class SitesServer:
    """A SuperLink with our ServerApp in it. Everything that it started ends with the context.

    Args:
        options: what was asked for.
        text: the run file as it was understood.
        keys: the sites' public keys by name; empty where none is checked.
    """

    def __init__(self, options: ServerOptions, text: str, keys: dict[str, bytes]) -> None:
        self.options, self.text, self.keys = options, text, keys
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._run = 0

    def __enter__(self) -> SitesServer:
        state = self.options.state
        with contextlib.ExitStack() as stack:
            stack.enter_context(alone(state, "server"))
            _refuse_taken(self.options.host, self.options.port)
            self._held = stack.pop_all()
        for name in (RUN_ID, PID):
            (state / name).unlink(missing_ok=True)
        write_secretly(state / SECRET, secrets.token_bytes(32))
        write_secretly(state / SETTINGS, json.dumps(_settings(self.options)).encode())
        flower.write_commands(state, {"flwr-serverapp": "allhands.federated.sites.server_process"})
        return self

    def __exit__(self, *_: object) -> None:
        with self._held:
            self._end()

    def _end(self) -> None:
        self._end_app()
        for child in reversed(self._children.values()):
            child.terminate()
        deadline = time.monotonic() + 5
        for child in self._children.values():
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def start(self) -> None:
        """Start the processes, let the sites' keys in, and submit the run.

        Raises:
            UserError: one of them ended; with the last lines that it printed.
        """
        wanted = commands(self.options)
        self._spawn("superlink", wanted["superlink"])
        host, deadline = own_host(self.options), time.monotonic() + _START
        while not _listens(host, self.options.port):
            self.check()
            if time.monotonic() > deadline:
                raise UserError(
                    f"the SuperLink did not listen at {address(host, self.options.port)} within "
                    f"{_START:.0f} s (the certificate's name must lead to this machine, if only by "
                    f"a line in /etc/hosts); see {self.options.state / 'superlink.out'}"
                )
            time.sleep(0.1)
        self.control = Control(address(host, self.options.port), self.options.authority)
        try:
            if not self.options.insecure:
                self.control.register(self.keys)
            self._run = self.control.start(self.text)
        except Unanswered as error:
            self.check()
            raise UserError(
                f"the SuperLink does not take the run: {error}; see "
                f"{self.options.state / 'superlink.out'}"
            ) from error
        write_secretly(self.options.state / RUN_ID, str(self._run).encode())
        self._spawn("superexec", wanted["superexec"])

    def wait(self) -> Iterator[None]:
        """Yield until the run has ended, a few times a second.

        Raises:
            UserError: the run failed; with its reason.
        """
        asked, answered = 0.0, time.monotonic()
        while True:
            self.check()
            if time.monotonic() - asked > _EVERY:
                asked = time.monotonic()
                try:
                    ended, answered = self.control.ended(self._run), asked
                except Unanswered as error:  # it is busy, or has ended, which the next look tells
                    if asked - answered > _SILENCE:
                        raise UserError(
                            f"the SuperLink does not answer: {error}; see "
                            f"{self.options.state / 'superlink.out'}"
                        ) from error
                    ended = None
                if ended is not None and ended[0] == "completed":
                    return
                if ended is not None:
                    raise UserError(
                        f"the run {ended[0] or 'ended'}: {_plain(ended[1])}; see "
                        f"{self.options.state / LOG}"
                    )
            yield
            time.sleep(0.2)

    def check(self) -> None:
        """Raises `UserError` when one of the processes has ended."""
        for name, child in self._children.items():
            if child.poll() is not None:
                lines = (
                    (self.options.state / f"{name}.out")
                    .read_text(errors="replace")
                    .strip()
                    .splitlines()
                )
                raise UserError(
                    f"the {name} ended with code {child.returncode}: {' | '.join(lines[-5:])}"
                )

    def _spawn(self, name: str, command: list[str]) -> None:
        environment = flower.environment(self.options.state, **{STATE: str(self.options.state)})
        self._children[name] = spawn(command, environment, self.options.state / f"{name}.out")

    def _end_app(self) -> None:
        """Let the ServerApp abandon its round."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.options.state / PID).read_text(encoding="utf-8"))
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + _GRACE
            # Nobody asks after it once it has ended, so that it stays listed ("Z") until Flower's
            # superexec ends too.
            while processes.state(pid) not in ("", "Z"):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    return
                time.sleep(0.05)


def _settings(options: ServerOptions) -> dict[str, Any]:
    def text(path: Path | None) -> str | None:
        return None if path is None else str(path)

    return {
        "config": [str(path) for path in options.config],
        "overrides": list(options.overrides),
        "data": text(options.data),
        "allow": text(options.sites),
        "tokens": text(options.tokens),
        "insecure": options.insecure,
    }


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _refuse_taken(host: str, port: int) -> None:
    try:
        wire.listen(host, port).close()
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port} cannot be listened on: {error.strerror}; name another"
        ) from None


def _plain(details: str) -> str:
    """A run's failure without Flower's words around it."""
    return (
        details.removeprefix("ServerApp failed with exception: ").rstrip(".")
        or "no reason was given"
    )
