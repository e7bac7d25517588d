"""The server of `tests/fork_client.py`: it has torch imported, and forks what clients ask for.

It is the parent of all that such a script leaves behind. It ends that, and writes down what it was.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import marshal
import multiprocessing.spawn
import os
import random
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fork_agents import let_agents_set_threads, set_environment, set_threads, spare_agent
from tests.fork_hosts import Host
from tests.patience import patience

# Seconds for what a script has left behind to end by itself.
_GRACE_S = 10.0
_PRELOAD = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "torchmetrics",
    "rich.console",
    "rich.progress",
    "cloudpickle",
    "encodings.idna",
    "allhands.cli.main",
    "allhands.kvstore",
    "allhands.runner",
)
# Where the environment has TensorFlow.
_TENSORFLOW = ("tensorflow", "allhands.horovod.tensorflow.keras")
# Flower, for the processes of sites, once one of them is asked for.
_FLOWER = (
    "allhands.federated.sites.client_app",
    "allhands.federated.sites.warm_process",
    "flwr.supercore.cli.flower_superexec",
    "flwr.superlink.cli.flower_superlink",
    "flwr.superlink.runtime.run_serverapp",
    "flwr.supernode.cli.flower_supernode",
    "flwr.supernode.runtime.run_clientapp",
    "flwr.supernode.start_client_internal",
)
#: The environment's scripts that are run too.
SCRIPTS = ("allhands", "torchrun", "flower-superexec")
#: The interpreter itself.
PYTHON = sys.executable
#: In the command of an agent of a launched job.
AGENT = "allhands.launch.agent"
#: In the environment of the server: where its socket and programs are.
FOLDER = "FORK_SERVER"
#: So is room for variables that scripts have and the server has not.
ROOM = "FORK_SERVER_ROOM"
#: A script inherits this many descriptors, whatever their numbers.
MOST_DESCRIPTORS = 250  # one message of Linux carries 253


class _Call:
    """A script that runs."""

    def __init__(self, client: socket.socket, on_host: bool) -> None:
        self.client, self.on_host = client, on_host
        self.status: int | None = None
        self.ended_at = 0.0


class _Server:
    """Forks a process for each client, and tells it how that ended."""

    def __init__(self, folder: str) -> None:
        self.left = os.path.join(folder, "left")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(os.path.join(folder, "socket"))
        self.listener.listen(64)
        self.wake, self.wake_end = os.pipe()
        for end in (self.wake, self.wake_end):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_end, warn_on_full_buffer=False)
        self.calls: dict[int, _Call] = {}
        self.of_imports: dict[str, str] = {}  # variables that modules have set
        self.poll = select.poll()
        for end in (0, self.wake, self.listener.fileno()):
            self.poll.register(end, select.POLLIN)

    def serve(self) -> tuple[list[str], Any] | None:
        """Until standard input ends. In a fork it returns the words of the script, and where it
        asks for an agent."""
        while True:
            waits = any(call.status is not None for call in self.calls.values())
            for descriptor, _ in self.poll.poll(50 if waits else None):
                if descriptor == 0:
                    return None
                if descriptor == self.wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake, 4096)
                elif descriptor == self.listener.fileno():
                    begun = self._begin()
                    if begun is not None:
                        return begun
                else:
                    self._pass_on(descriptor)
            self._reap()
            self._answer()

    def _begin(self) -> tuple[list[str], Any] | None:
        client, _ = self.listener.accept()
        _, ancillary, _, _ = client.recvmsg(10, socket.CMSG_SPACE(4 * (MOST_DESCRIPTORS + 1)))
        if not ancillary:  # the client was killed
            client.close()
            return None
        *ends, request = array.array("i", ancillary[0][2])
        size = os.fstat(request).st_size
        call = marshal.loads(os.pread(request, size, 0))
        words, environment, folder, umask, ignored, inherited = call
        os.close(request)
        if any(word.startswith("allhands.federated.sites.") for word in words):
            self._import_flower(environment)
        try:
            host = Host(client)
        except FileNotFoundError:  # it was killed just now
            for end in ends:
                os.close(end)
            client.close()
            return None
        parent = os.getpid()
        pid = host.fork()
        if pid == 0:
            processes = sys.modules["allhands.launch.processes"]
            os.setsid()
            processes.die_with_parent(0 if host.is_other else parent)
            host.enter()
            _forget_handlers(ignored)
            for one in (client, self.listener, *(call.client for call in self.calls.values())):
                one.close()
            _inherit(dict(zip(inherited, ends, strict=True)), (self.wake, self.wake_end))
            os.umask(umask)
            _enter({**self.of_imports, **environment}, folder)
            return words, None if host.is_other else spare_agent()
        host.close()
        for end in ends:
            os.close(end)
        self.calls[pid] = _Call(client, host.is_other)
        self.poll.register(client, select.POLLIN)
        return None

    def _import_flower(self, environment: Mapping[str, str]) -> None:
        """It reads some variables as it is imported, which are the same for all its processes."""
        if "flwr" in sys.modules or importlib.util.find_spec("flwr") is None:
            return
        own = dict(os.environ)
        os.environ.update(
            {name: value for name, value in environment.items() if name.startswith("FLWR_")}
        )
        given = dict(os.environ)
        for name in _FLOWER:
            importlib.import_module(name)
        self.of_imports = {
            name: value for name, value in os.environ.items() if given.get(name) != value
        }
        os.environ.clear()
        os.environ.update(own)
        gc.collect()
        gc.freeze()

    def _pass_on(self, descriptor: int) -> None:
        pid, call = next(
            (pid, call) for pid, call in self.calls.items() if call.client.fileno() == descriptor
        )
        data = call.client.recv(10)
        if call.status is None:
            os.kill(pid, int(data) if data else signal.SIGKILL)
        if not data:
            self.poll.unregister(descriptor)

    def _reap(self) -> None:
        processes = sys.modules["allhands.launch.processes"]
        for pid, status in processes.ended_children():
            if pid in self.calls:
                self.calls[pid].status, self.calls[pid].ended_at = status, time.monotonic()

    def _answer(self) -> None:
        """Tell the clients whose scripts have ended, with all that they started. What is left while
        others run is the business of the last one.

        Those on hosts are told at once: a connection to a host ends after them, and is itself what
        a script has started here. What is left on hosts is the business of their tests.
        """
        ended = {pid: call for pid, call in self.calls.items() if call.status is not None}
        for pid in [pid for pid, call in ended.items() if call.on_host]:
            self._tell(pid, ended.pop(pid))
        if not ended:
            return
        if len(ended) == len(self.calls):
            processes = sys.modules["allhands.launch.processes"]
            left = processes.children(os.getpid())
            since = max(call.ended_at for call in ended.values())
            if left and time.monotonic() < since + patience(_GRACE_S):
                return
            if left:
                self._end_what_is_left(left)
        for pid, call in ended.items():
            self._tell(pid, call)

    def _tell(self, pid: int, call: _Call) -> None:
        with contextlib.suppress(OSError):
            call.client.send(b"%d" % call.status)
        with contextlib.suppress(KeyError):
            self.poll.unregister(call.client)
        call.client.close()
        del self.calls[pid]

    def _end_what_is_left(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                words = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .replace(b"\n", b" ")
                )
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                with open(self.left, "ab") as file:
                    file.write(b"%d %s\n" % (pid, words[:150]))


def _inherit(ends: Mapping[int, int], own: tuple[int, ...]) -> None:
    """Have these descriptors, by their numbers in the client, and not the server's own."""
    free = 1 + max((*ends, *own, *ends.values()))
    high = {number: fcntl.fcntl(end, fcntl.F_DUPFD, free) for number, end in ends.items()}
    for end in {0, 1, 2, *own, *ends.values()}:
        os.close(end)
    for number, end in high.items():
        os.dup2(end, number)
        os.close(end)


def _forget_handlers(ignored: list[str]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ignored:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def _enter(environment: Mapping[str, str], folder: str) -> None:
    """Give this process the variables and the folder."""
    set_environment(environment)
    os.chdir(folder)
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["allhands.compat"].keep_libraries()
    set_threads()
    if "PYTHONUNBUFFERED" in environment:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------- the script


def _run(words: list[str]) -> None:
    from allhands.launch import worker

    program, *rest = words
    sys.orig_argv = words
    safe = rest[:1] == ["-P"]
    rest = rest[1:] if safe else rest
    if program != PYTHON:
        worker.run_script(program, rest)
    elif rest[0] == "-m":
        worker._run_module(rest[1], rest[2:])
    elif rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        if not safe:
            sys.path.insert(0, "")
        if AGENT in rest[1]:
            let_agents_set_threads()
        main = worker._main_module(__loader__=None, __spec__=None)
        exec(compile(rest[1], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        worker.run_script(rest[0], rest[1:])


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    ours = (__file__, sys.modules["allhands.launch.worker"].__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _let_threads_go_first() -> None:
    """Have a script's group wait for its threads before it is destroyed.

    PyTorch joins them with the interpreter's lock held, which one of them may need to free the
    tensors of the last collective. In a new interpreter that destroys a group, imports let go of
    the lock first; here all is imported.
    """
    import torch.distributed as dist

    from allhands.world.native_threads import wait_until_asleep

    plain = dist.destroy_process_group

    @functools.wraps(plain)
    def destroy(group: Any = None) -> None:
        wait_until_asleep()
        plain(group)

    dist.destroy_process_group = destroy
    dist.distributed_c10d.destroy_process_group = destroy


def _use_huge_pages() -> None:
    """Let memory lie in pages of 2 MB, where the kernel can: a fork copies a table of all pages."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    collapse, size = 25, 1 << 21  # MADV_COLLAPSE, since Linux 6.1
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, rights, *_ = line.split()
        start, end = (int(edge, 16) for edge in area.split("-"))
        start, end = -(-start // size) * size, end // size * size
        if rights.startswith("rw") and end > start:
            madvise(start, end - start, collapse)


def main() -> None:
    """The server; a fork goes on from here with the script."""
    folder = os.environ.pop(FOLDER)
    gc.disable()
    has_tensorflow = importlib.util.find_spec("tensorflow") is not None
    for name in (*_PRELOAD, *(_TENSORFLOW if has_tensorflow else ())):
        importlib.import_module(name)
    _let_threads_go_first()
    gc.collect()
    gc.freeze()
    gc.enable()
    _use_huge_pages()
    from allhands.launch import processes

    processes.adopt_orphans()
    server = _Server(folder)
    os.write(1, b"ready\n")
    begun = server.serve()
    if begun is None:
        return
    words, is_agent = begun
    # What the script starts by it finds torch imported too.
    sys.executable = os.path.join(folder, "bin", "python")
    multiprocessing.spawn.set_executable(sys.executable)
    if is_agent:
        let_agents_set_threads()
        sys.modules["allhands.launch.agent"].main()
        os._exit(0)
    _end_after(words)


def _end_after(words: list[str]) -> None:
    """Run the script and end with its code, as a launched worker does: exit handlers run, and the
    interpreter, with all that the server has imported, is not taken down."""
    from allhands.launch import worker

    code, number = 0, None
    try:
        _run(words)
    except SystemExit as leave:
        if not isinstance(leave.code, int | None):
            print(leave.code, file=sys.stderr)
        code = leave.code & 0xFF if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException as error:
        error.__traceback__ = _without_ours(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        code, number = 1, signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
    worker._end(code, number)
