"""How an agent comes to life on another host, behind whatever login shell is there.

The shell sees one short command in plain characters. All else arrives on standard input: first one
line with the variables and the program (`first_message`), then the conversation with the agent. So
nothing has to survive a shell's quoting, and no secret is ever in a command line. The first Python
only sets the variables and becomes the second one, because the dynamic linker and Python itself
read some variables only when a process starts.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allhands.errors import HostError
from allhands.launch.handle import AgentHandle
from allhands.launch.output import show
from allhands.launch.protocol import write_all

# Importing this package, without torch, from a cold network file system.
START_TIMEOUT = 120.0

# What the login files of a shell print comes before this line and is ignored.
AGENT_LINE = b"allhands agent 1\n"

# torch's store says this of every connection from an address that has no name, which is no trouble.
_NO_NAME = b"The hostname of the client socket cannot be retrieved"

# Runs under any Python, old ones included, so that it can say what is wrong. Byte by byte: what
# follows the line is the agent's.
_FIRST = (
    'import json,os;exec(json.loads(b"".join(iter(lambda:os.read(0,1)or '
    'os._exit(9),chr(10).encode())).decode())["program"])'
)

# How every program begins that `first_message` sends: it may meet an old Python.
_BEGIN = """
import os, sys
message = {message!r}
if sys.version_info < (3, 11):
    words = (sys.executable, sys.version.split()[0])
    sys.stderr.write("%s is Python %s; allhands needs 3.11 or newer\\n" % words)
    sys.exit(3)
for name, value in message["env"].items():
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
"""

# The signals that an agent handles wait until it does (`processes.take_signals`).
_BECOME_AGENT = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
os.execv(sys.executable, [sys.executable, "-c", message["agent"]])
"""

# `-c` puts the working folder first on the path, where a file named like a standard module would
# break the agent.
_AGENT = """
import os, sys
sys.flags.safe_path or sys.path.pop(0)
try:
    from allhands.launch.agent import main
except ImportError as error:
    sys.stderr.write("%s cannot import allhands: %s\\n" % (sys.executable, error))
    sys.exit(4)
os.write(1, {line!r})
main()
"""


def agent_words(python: str) -> list[str]:
    """The command that becomes an agent, where no shell is in between."""
    return [python, "-c", _FIRST]


def agent_command(python: str) -> str:
    """The command for a login shell. `python` is quoted already."""
    return f"exec {python} -c '{_FIRST}'"


def agent_message(env: Mapping[str, str | None]) -> bytes:
    """The line that `agent_command` waits for: the variables to set, or with None to remove."""
    return first_message(env, _BECOME_AGENT, agent=_AGENT.format(line=AGENT_LINE))


def first_message(env: Mapping[str, str | None], program: str, **more: Any) -> bytes:
    """A line that sets variables and runs a program, which finds `more` in its ``message``."""
    begin = _BEGIN.format(message={"env": dict(env), **more})
    return json.dumps({"program": f"{begin}{program}\n"}).encode("ascii") + b"\n"


def start_process(
    words: Sequence[str], message: bytes, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start what leads to an agent and hand it its first message.

    Args:
        words: the command; ssh, srun, or Python itself.
        message: see `first_message`.
        env: of the command; None: that of this process.
    """
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=env,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # what is wrong is told by its exit
        write_all(process.stdin.fileno(), message)
    return process


def await_agent(
    process: subprocess.Popen[bytes],
    host: str,
    python: str,
    explain: Callable[[str], str] | None = None,
    timeout: float = START_TIMEOUT,
) -> AgentHandle:
    """Wait until the agent answers that `process` (ssh or srun) leads to.

    What it prints on standard error is shown with the host's name from then on.

    Args:
        process: with pipes as its standard streams.
        host: its name, for messages.
        python: the Python that was to run there.
        explain: turns what `process` said into a reason, when it failed itself (exit code 255, as
            ssh does).
        timeout: seconds for it.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    said: collections.deque[bytes] = collections.deque(maxlen=20)
    show_from_now = threading.Event()
    reader = threading.Thread(
        target=_read_stderr, args=(process, host, said, show_from_now), daemon=True
    )
    reader.start()
    fd, data = process.stdout.fileno(), b""
    deadline = time.monotonic() + timeout
    while AGENT_LINE not in data:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(fd, 65536) if ready else b""
        if not piece:
            code = _exit_code(process) if ready else None
            process.kill()
            reader.join(2)
            if code == 255 and explain is not None:
                raise HostError(host, explain(b"".join(said).decode("utf-8", "replace")))
            raise HostError(host, _why_no_agent(code, said, python, timeout))
        data = (data + piece)[-(1 << 20) :]
    agent = AgentHandle(process, host=host, local=False, said=said)
    agent.noise, _, agent.early = data.partition(AGENT_LINE)
    show_from_now.set()
    return agent


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(5)
    except subprocess.TimeoutExpired:
        return None


def _why_no_agent(
    code: int | None, said: collections.deque[bytes], python: str, timeout: float
) -> str:
    text = b"".join(said).decode("utf-8", "replace").strip()
    last = (text.splitlines() or ["nothing was said"])[-1]
    if code is None:
        return f"{python} did not start within {timeout:.0f} s ({last})"
    if "allhands needs 3.11" in text:
        return f"{last}; name another with --python PATH"
    if "cannot import allhands" in text:
        return (
            f"{last}; install the same version there (`{python} -m pip install allhands`), or "
            "name another Python with --python"
        )
    if (
        code in (126, 127)
        or "not found" in text
        or "No such file" in text
        or "Unknown command" in text
    ):
        return (
            f"there is no Python at {python} ({last}); name the one that has torch and allhands "
            "with --python PATH"
        )
    return f"{python} ended with exit code {code}: {text or last}"


def _read_stderr(
    process: subprocess.Popen[bytes],
    host: str,
    said: collections.deque[bytes],
    shown: threading.Event,
) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if _NO_NAME in line:
            continue
        said.append(line)
        if shown.is_set():
            show(sys.stderr, b"[%s] %s" % (host.encode(), line))
