"""One host that is reached through OpenSSH: its connection, copies of files, and the agent there.

The agent's connection carries everything else to its host as well (`ControlMaster`). It ends with
the agent, and the agent ends when its standard input does: with this process, however that goes.
The user's configuration, agent and known hosts decide how it is made, and nothing is ever answered
on the user's behalf (`BatchMode`): a host key that is not known is an error.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from allhands.errors import HostError, UserError
from allhands.launch.handle import AgentHandle
from allhands.launch.hosts import HostSpec
from allhands.launch.output import show
from allhands.launch.remote import agent_command, agent_message, await_agent, start_process

CONNECT_TIMEOUT = 10
SSH_FAILED = 255
# A connection without an answer for three times so many seconds is broken.
_ALIVE_EVERY = 5
# Never copied to the hosts: history, results of earlier runs, and what only fits the machine that
# made it.
EXCLUDED = (".git", "logs", "__pycache__", ".venv", "*.pyc")

# What ssh says, and what to do about it.
_ADVICE = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that is known for it. Somebody may be listening in, or it was "
        "set up anew; find out which, then remove the old key with `ssh-keygen -R {host}`",
    ),
    (
        "Host key verification failed",
        "its host key is not known here. Run `ssh {host}` once, compare the fingerprint, and "
        "accept it",
    ),
    (
        "Permission denied",
        "it refuses the login. `ssh {host}` must work without a password: add your key to its "
        "~/.ssh/authorized_keys "
        "(ssh-copy-id {host}), name it in ~/.ssh/config, or load it with ssh-add",
    ),
    (
        "Could not resolve hostname",
        "its name cannot be resolved. Check the spelling, or add it to ~/.ssh/config with its "
        "HostName",
    ),
    (
        "Connection refused",
        "nothing answers on its ssh port. Is sshd running there, and is the port right "
        "(user@host:port)?",
    ),
    ("timed out", "it does not answer. Is it switched on, and does a firewall let ssh through?"),
    (
        "No route to host",
        "there is no way to it in the network. Is it switched on, and is the address right?",
    ),
)


class SshHost:
    """A host that ssh reaches.

    Args:
        spec: which one, and how.
        python: path of the Python interpreter there, with torch and allhands.
        env: variables for all workers there; they travel on standard input.
        copy: a folder here, the folder there that shall hold the same, and patterns to leave out.

    Raises:
        UserError: this machine has no ssh.
    """

    local = False

    def __init__(
        self,
        spec: HostSpec,
        python: str,
        env: Mapping[str, str | None],
        copy: tuple[str, str, Sequence[str]] | None = None,
    ) -> None:
        program = shutil.which("ssh")
        if program is None:
            raise UserError(
                "there is no ssh program on this machine; install OpenSSH's client (apt-get "
                "install openssh-client)"
            )
        self.name = spec.name
        self.spec = spec
        self._program, self._python, self._env, self._copy = program, python, dict(env), copy
        self._copying: subprocess.Popen[bytes] | None = None
        # A socket's path may have about 100 characters only, which TMPDIR may exceed. ssh removes
        # it when it ends, so nothing is left even when this process is killed; nobody else can know
        # the name before.
        self._socket = f"/tmp/allhands-ssh-{secrets.token_hex(12)}"

    def command(self, remote: str, *, carries_others: bool = False) -> list[str]:
        """The words of a local command that runs `remote` in a shell of the host.

        It goes over the connection of the agent where there is one. `carries_others`: it is that
        connection itself.
        """
        options = {
            "BatchMode": "yes",
            "ControlMaster": "yes" if carries_others else "no",
            "ControlPersist": "no",
            "ControlPath": self._socket,
            "ConnectTimeout": CONNECT_TIMEOUT,
            "ServerAliveInterval": _ALIVE_EVERY,
            "ServerAliveCountMax": 3,
            "ForwardX11": "no",
            "ClearAllForwardings": "yes",
            "PermitLocalCommand": "no",
        }
        target = ["-l", self.spec.user] if self.spec.user else []
        target += ["-p", str(self.spec.port)] if self.spec.port else []
        return [
            self._program,
            "-T",
            *(f"-o{name}={value}" for name, value in options.items()),
            *target,
            "--",
            self.name,
            remote,
        ]

    def run(
        self, remote: str, timeout: float, data: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a shell command on the host; bytes of its standard output and error.

        Raises:
            HostError: the host cannot be reached, or the command did not end within `timeout`
                seconds.
        """
        try:
            done = subprocess.run(
                self.command(remote), input=data, capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise HostError(
                self.name, f"{remote.partition(' ')[0]!r} did not end within {timeout:.0f} s"
            ) from None
        if done.returncode == SSH_FAILED:
            raise HostError(self.name, explain(self.name, done.stderr.decode("utf-8", "replace")))
        return done

    def close(self) -> None:
        """End a copy that is under way; the connection ends with the agent."""
        if self._copying is not None:
            self._copying.kill()

    # ------------------------------------------------------------------ files

    def copy(self, source: str, destination: str, exclude: Sequence[str] = ()) -> None:
        """Make the folder `destination` of the host hold what `source` here holds, apart from
        EXCLUDED and `exclude`.

        Files that are only there stay.

        Raises:
            HostError: it failed; says why.
            UserError: this machine has no rsync.
        """
        if shutil.which("rsync") is None:
            raise UserError(
                "--sync-dst-dir copies with rsync, and this machine has none (apt-get install "
                "rsync)"
            )
        made = self.run(f"mkdir -p {neutral(destination)}", 60)
        if made.returncode:
            raise HostError(
                self.name, f"cannot make the folder {destination}: {_last_line(made.stderr)}"
            )
        # Without the host and the command, which rsync appends.
        shell = shlex.join(self.command("")[:-3])
        words = [
            "rsync",
            "-az",
            "-e",
            shell,
            *(f"--exclude={pattern}" for pattern in (*EXCLUDED, *exclude)),
        ]
        name = f"[{self.name}]" if ":" in self.name else self.name
        self._copying = subprocess.Popen(
            [*words, "--", source.rstrip("/") + "/", f"{name}:{destination}/"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        said = self._copying.communicate()[1].decode("utf-8", "replace").strip()
        code = self._copying.returncode
        self._copying = None
        if code:
            raise HostError(
                self.name,
                f"rsync to {destination} failed (exit code {code}): {_explain_rsync(said)}",
            )

    # ------------------------------------------------------------------ agent

    def start(self) -> AgentHandle:
        """Connect, start an agent on the host, and copy the files.

        Raises:
            HostError: it cannot be reached, the copying failed, there is no such Python, it is too
                old, or it lacks allhands.
        """
        words = self.command(agent_command(neutral(self._python)), carries_others=True)
        process = start_process(words, agent_message(self._env))
        agent = await_agent(process, self.name, self._python, lambda said: explain(self.name, said))
        try:
            if self._copy is not None:
                source, destination, exclude = self._copy
                show(
                    sys.stderr,
                    f"allhands: rsync {source.rstrip('/')}/ -> "
                    f"{self.name}:{destination}\n".encode(),
                )
                self.copy(source, destination, exclude)
        except BaseException:
            agent.kill()
            raise
        return agent


def neutral(word: str) -> str:
    """A word in quotes that every shell understands alike: sh, bash, csh, tcsh, fish."""
    odd = sorted(set(word) & set("'\\!\n\r\0"))
    if odd:
        raise UserError(
            f"{word!r} holds {' and '.join(map(repr, odd))}, which shells read differently; choose "
            "another name"
        )
    return word if word and all(c.isalnum() or c in "/._-+:@%," for c in word) else f"'{word}'"


def explain(host: str, said: str) -> str:
    """What ssh printed, with what to do about it."""
    said = said.strip()
    for sign, advice in _ADVICE:
        if sign in said:
            return f"{advice.format(host=host)} (ssh said: {said.splitlines()[-1]})"
    return f"ssh cannot log in: {said or 'it said nothing'}"


def _explain_rsync(text: str) -> str:
    last = next((line for line in text.splitlines() if not line.startswith("rsync error")), text)
    if "command not found" in text or "not found" in text or "Unknown command" in text:
        return f"rsync is not installed there (apt-get install rsync). It said: {last}"
    if "No space left on device" in text:
        return (
            "the disk is full. It said: "
            f"{next(line for line in text.splitlines() if 'No space left' in line)}"
        )
    return text or "it said nothing"


def _last_line(data: bytes) -> str:
    return (data.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1]
