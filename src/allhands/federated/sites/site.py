"""`allhands federated site`: the warm process and Flower's SuperNode, started, watched, and stopped
together."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allhands import wire
from allhands.errors import UserError
from allhands.federated.sites import client_app, flower, task_pipe
from allhands.federated.sites.certificates import check_authority, probe
from allhands.federated.sites.site_keys import check_name, fingerprint, read_site_key, site_token
from allhands.federated.sites.supervision import (
    SECRET,
    Stopped,
    alone,
    signals,
    spawn,
    write_secretly,
)
from allhands.launch import processes

# Seconds: between two looks at the children; between two tries to reach the server; from asking a
# child to end to killing it.
_EVERY, _RETRY, _GRACE = 0.2, 2.0, 5.0
# Before a child is started again; it runs steadily after the last.
_FIRST_PAUSE, _LONGEST_PAUSE, _STEADY = 1.0, 60.0, 60.0
_SAY_AGAIN = 30.0  # seconds between two lines that say the same


@dataclass(frozen=True)
class SiteOptions:
    """What `allhands federated site` was asked for; the files are absolute.

    Attributes:
        server: where the server is, ``HOST:PORT``.
        data: the folder of the site's own data.
        name: the site's, as in the server's list.
        key, authority: the site's private key, and the certificate of the authority that signed the
            server's; None: insecure.
        token_file: a file with the site's token; None: the environment's, if there is one.
        state: the folder for what outlives a restart.
        port: of loopback, for Flower's processes of this site; None: one that is free.
    """

    server: str
    data: Path
    name: str
    key: Path | None
    authority: Path | None
    token_file: Path | None
    state: Path
    port: int | None = None

    @property
    def insecure(self) -> bool:
        return self.authority is None


def address_of(server: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``. Raises `UserError` when it is something else."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--server {server}; write HOST:PORT, such as example.org:8000")
    return host.strip("[]"), int(port)


def commands(options: SiteOptions) -> dict[str, list[str]]:
    """The processes that run, by name."""
    state, port = options.state, options.port or wire.free_port()
    trust = ["--insecure"] if options.insecure else ["--root-certificates", str(options.authority)]
    key = [] if options.key is None else ["--auth-supernode-private-key", str(options.key)]
    secret = ["--superexec-auth-secret-file", str(state / SECRET)]
    return {
        "warm": client_app.warm_command(state),
        "supernode": [
            sys.executable,
            "-P",
            "-m",
            "allhands.federated.sites.supernode",
            *trust,
            "--superlink",
            options.server,
            *key,
            "--isolation",
            "process",
            *secret,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--node-config",
            f"{client_app.SOCKET}={json.dumps(str(state / 'warm.sock'))}",
        ],
        # Its own processes talk over loopback, where the secret says who is who.
        "superexec": [
            sys.executable,
            "-P",
            "-m",
            "allhands.federated.sites.superexec",
            "--insecure",
            "--runtime-api-address",
            f"127.0.0.1:{port}",
            *secret,
        ],
    }


def check(options: SiteOptions) -> None:
    """Read what the site needs, before anything starts.

    Raises:
        UserError: a name, an address or a file that cannot be used.
    """
    flower.require()
    check_name(options.name)
    address_of(options.server)
    if options.key is not None:
        read_site_key(options.key)
    if options.authority is not None:
        check_authority(options.authority)
    site_token(options.token_file, os.environ)
    if not options.data.is_dir():
        raise UserError(f"--data {options.data} is not a folder")


def run(options: SiteOptions, text: str, define: str = client_app.DEFINE) -> int:
    """Take part in whatever the server trains, until a signal ends it; the exit code.

    Args:
        options: what was asked for.
        text: the run file, with the site's data in it.
        define: names the function that makes the objects of the run file.

    Raises:
        UserError: a file, the data, or the server's certificate cannot be used.
    """
    check(options)
    if options.insecure:
        _say("INSECURE: plain text, and nobody proves who they are")
    try:
        with signals(), alone(options.state, "site"), Site(options, text, define) as site:
            site.start()
            while True:
                site.watch()
                time.sleep(_EVERY)
    except Stopped as stopped:
        _say(f"stopped by {processes.signal_name(stopped.number)}")
        return 128 + stopped.number


class Site:
    """The processes of a site. All that it started ends with the context."""

    def __init__(self, options: SiteOptions, text: str, define: str) -> None:
        self.options, self.text, self.define = options, text, define
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._began: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._said: dict[str, float] = {}
        self.commands: dict[str, list[str]] = {}

    def __enter__(self) -> Site:
        state = self.options.state
        run_file = state / "run.yml"
        write_secretly(run_file, self.text.encode())
        write_secretly(state / SECRET, secrets.token_bytes(32))
        settings = client_app.settings_of(
            state,
            self.options.name,
            [str(run_file)],
            None,
            self.options.token_file,
            None,
            self.define,
        )
        client_app.write_task(state, settings)
        flower.write_commands(state, {"flwr-clientapp": "allhands.federated.sites.message_process"})
        self.commands = commands(self.options)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("superexec", "supernode", "warm"):
            self._end(name)

    def start(self) -> None:
        """Start the warm process, and when it has its data and the server answers, Flower's.

        Raises:
            UserError: the warm process cannot be started, or the server is not to be trusted.
        """
        self._spawn("warm")
        while not self._is_ready():
            if (code := self._children["warm"].poll()) is not None:
                raise UserError(
                    f"the site's warm process {_end_of(code)}; what it printed says why"
                )
            time.sleep(_EVERY)
        host, port = address_of(self.options.server)
        while (
            reason := probe(host, port, self.options.authority, insecure=self.options.insecure)
        ) is not None:
            self._say_again(f"waiting for the server: {reason}")
            self.watch()
            time.sleep(_RETRY)
        self._start_flower()
        _say(f"connected to {self.options.server}; Ctrl-C ends this site")

    def watch(self) -> None:
        warm = self._children["warm"]
        if (code := warm.poll()) is not None:
            self._again("warm", f"the warm process {_end_of(code)}")
            self._spawn("warm")
        for name in ("supernode", "superexec"):
            child = self._children.get(name)
            if child is not None and (code := child.poll()) is not None:
                reason = self._reason(name, code)
                self._end("superexec")
                self._end("supernode")
                self._again("supernode", reason)
                self._start_flower()
                return

    def _again(self, name: str, reason: str) -> None:
        """Say why something is started again, after a pause that grows while it does not run
        steadily."""
        steady = time.monotonic() - self._began[name] > _STEADY
        if steady:
            pause = _FIRST_PAUSE
        else:
            pause = min(_LONGEST_PAUSE, 2 * self._pauses.get(name, _FIRST_PAUSE / 2))
        self._pauses[name] = pause
        _say(f"{reason}; it is started again in {pause:.0f} s")
        time.sleep(pause)

    def _reason(self, name: str, code: int) -> str:
        lines = (
            (self.options.state / f"{name}.out")
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()
        )
        said = [line.strip() for line in lines if line.strip()]
        if "Exit Code: 305" in "\n".join(said):
            if self.options.key is None:
                who = ""
            else:
                who = f" with the key {fingerprint(read_site_key(self.options.key))}"
            return (
                f"the server does not let {self.options.name} in{who}: it must be in the server's "
                "list of sites (--sites), and no other site may use it"
            )
        return f"the {name} {_end_of(code)}: {' | '.join(said[-3:])}"

    def _start_flower(self) -> None:
        reader, writer = os.pipe()
        try:
            self._spawn("supernode", writer)
            self._spawn("superexec", reader)
        finally:
            os.close(reader)
            os.close(writer)

    def _is_ready(self) -> bool:
        return (self.options.state / "warm.sock").exists()

    def _spawn(self, name: str, pipe: int | None = None) -> None:
        state = self.options.state
        if name == "warm":
            (state / "warm.sock").unlink(missing_ok=True)
            # What the warm process says is for whoever started the site; Flower's processes have
            # files.
            self._children[name] = spawn(self.commands[name], os.environ, None)
        else:
            environment = flower.environment(
                state, **({} if pipe is None else {task_pipe.VARIABLE: str(pipe)})
            )
            self._children[name] = spawn(
                self.commands[name],
                environment,
                state / f"{name}.out",
                () if pipe is None else (pipe,),
            )
        self._began[name] = time.monotonic()

    def _end(self, name: str) -> None:
        """End a child, and what it has started."""
        child = self._children.pop(name, None)
        if child is None:
            return
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
        processes.signal_group(child.pid, signal.SIGKILL)
        child.wait()

    def _say_again(self, line: str) -> None:
        now = time.monotonic()
        if now - self._said.get(line, -_SAY_AGAIN) >= _SAY_AGAIN:
            self._said[line] = now
            _say(line)


def _end_of(code: int) -> str:
    return f"was ended by {processes.signal_name(-code)}" if code < 0 else f"ended with code {code}"


def _say(line: Any) -> None:
    print(line, flush=True)
