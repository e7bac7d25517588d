"""A Python that starts with torch imported, for tests of what a script does and not of how an
interpreter starts.

`import torch` takes a second of processor time, `torch._dynamo`, which every optimizer imports,
another one, and torchmetrics two. `bin_folder()` has a `python` and an `allhands` that run their
arguments in a fork of a server, one for each process of pytest, which has these imported. The
script keeps its standard streams, inherited descriptors, folder, variables, signals and exit code,
and is on the host of tests/cluster that it was started on. Other programs in the
folder are the environment's own, and so is Python where its options, or variables that libraries
read as they are loaded, ask for a new interpreter. Limits of resources are
those of the server.

The server is the parent of all that such a script leaves behind. It ends that, and `left()` says
what it was; `tests/conftest.py` lets the test fail.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.fork_agents import FORWARDED
from tests.fork_server import AGENT, FOLDER, MOST_DESCRIPTORS, PYTHON, ROOM, SCRIPTS

# The hosts of tests/cluster have a /tmp of their own.
_SEEN_BY_HOSTS = Path("/run") if os.access("/run", os.W_OK) else None
# Read by libraries as they are loaded.
_FIXED = ("PYTHON", "LD_", "ATEN_", "TORCH_", "OMP_", "MKL_", "GOMP_", "CUDA")

# The program that tests start: it hands everything to the server and does as the script did. It
# imports next to nothing.
_CLIENT = """\
#!{python} -IS
import marshal, os, signal, sys
program, python, address = {program!r}, {python!r}, {address!r}
fixed, names, cores, user = {fixed!r}, {names!r}, {cores!r}, {user!r}
def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

words = sys.argv[1:]
# The descriptor that reads the folder is closed by then.
inherited = [number for number in sorted(map(int, os.listdir("/proc/self/fd"))) if is_open(number)]

def start_anew():
    os.execv(program, [program, *words])

if len(inherited) > {most}:
    start_anew()
if program == python:
    rest = words[1:] if words[:1] == ["-P"] else words
    if not rest or not rest[0] or (rest[0][0] == "-" and rest[0] not in ("-c", "-m")):
        start_anew()
    if rest[0] == "-c" and {agent!r} in rest[1] and "SSH_CONNECTION" not in os.environ:
        start_anew()  # it outlives its launcher
    if rest[0] == "-c" and "SLURM_STEP_ID" in os.environ:
        start_anew()  # Slurm sends signals to all that an agent has started
if "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
    start_anew()  # the end of the interpreter is that of MPI
if os.sched_getaffinity(0) != cores or os.geteuid() != user:
    start_anew()
own = {{name: value for name, value in os.environ.items()
        if name.startswith(fixed[0]) and name not in fixed[2]}}
if own != fixed[1]:
    start_anew()
import array, socket
ignored = [name for name in names if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN]
pending = []
for name in names:
    if name not in ignored:
        signal.signal(getattr(signal, name), lambda number, _: pending.append(number))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    server.connect(address)
except OSError:
    start_anew()
umask = os.umask(0)
os.umask(umask)
call = marshal.dumps(([program, *words], dict(os.environ), os.getcwd(), umask, ignored, inherited))
request = os.memfd_create("request", 0)
os.write(request, call)
descriptors = array.array("i", [*inherited, request])
server.sendmsg([b"run"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
for descriptor in (*inherited, request):
    os.close(descriptor)
wake, wake_end = os.pipe()
os.set_blocking(wake_end, False)
signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
import select
poll = select.poll()
poll.register(server, select.POLLIN)
poll.register(wake, select.POLLIN)
answer = None
while answer is None:
    for descriptor, _ in poll.poll():
        if descriptor == wake:
            os.read(wake, 100)
        else:
            answer = server.recv(100)
    while pending:
        try:
            server.send(b"%d" % pending.pop(0))
        except OSError:
            pass
if not answer:
    os._exit(98)
status = int(answer)
if os.WIFSIGNALED(status):
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), number)
os._exit(os.WEXITSTATUS(status))
"""

# Scripts shall not find the modules of tests.
_START = """\
import sys
sys.path[0] = sys.argv[1]
from tests.fork_server import main
del sys.path[0]
for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
    del sys.modules[name]
main()
"""

_server: subprocess.Popen[bytes] | None = None


def bin_folder() -> Path:
    """The folder with `python`, `allhands` and the environment's other programs; starts the server
    if there is none."""
    global _server
    if _server is None or _server.poll() is not None:
        folder = Path(tempfile.mkdtemp(prefix="fork-server-", dir=_SEEN_BY_HOSTS))
        _write_programs(folder)
        environment = {**os.environ, FOLDER: str(folder), ROOM: " " * 2**14}
        _server = subprocess.Popen(
            [PYTHON, "-c", _START, str(Path(__file__).parents[1])],
            env=environment,
            stdin=subprocess.PIPE,  # its end is that of this process
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        _folders[_server.pid] = folder
        atexit.register(_end, _server, folder)
        assert _server.stdout is not None
        if _server.stdout.readline() != b"ready\n":
            raise RuntimeError("the server of tests/fork_server.py did not start")
    return _folders[_server.pid] / "bin"


_folders: dict[int, Path] = {}


def left() -> str:
    """The processes that scripts have left behind since the last call, a line each; but for
    connections to hosts of tests/cluster, which may have been cut."""
    if _server is None:
        return ""
    file = _folders[_server.pid] / "left"
    try:
        text = file.read_text(errors="replace")
        file.unlink()
    except FileNotFoundError:
        return ""
    return "".join(line for line in text.splitlines(True) if "/allhands-cluster/" not in line)


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.kill()
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _fixed() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FIXED) and name not in _NOT_FIXED
    }


# Set for each process anew, or for those that show their stacks as they are aborted.
_NOT_FIXED = (
    "OMP_NUM_THREADS",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTHONFAULTHANDLER",
    "PYTHONUNBUFFERED",
)


def _write_programs(folder: Path) -> None:
    own, programs = folder / "bin", Path(PYTHON).parent
    own.mkdir()
    for program in programs.iterdir():
        text = None
        if program.name in ("python", "python3", *SCRIPTS):
            is_python = program.name.startswith("python")
            text = _CLIENT.format(
                python=PYTHON,
                program=PYTHON if is_python else str(program),
                address=str(folder / "socket"),
                fixed=(_FIXED, _fixed(), _NOT_FIXED),
                names=FORWARDED,
                cores=os.sched_getaffinity(0),
                user=os.geteuid(),
                agent=AGENT,
                most=MOST_DESCRIPTORS,
            )
        if text is None:
            (own / program.name).symlink_to(program)
        else:
            (own / program.name).write_text(text)
            (own / program.name).chmod(0o755)
