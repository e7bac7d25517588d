"""Hosts the store through which the workers of one round find one another."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from datetime import timedelta

from allhands import wire
from allhands.launch import processes


class StoreHost:
    """A child process with a `torch.distributed.TCPStore` on a listener that was opened before.

    The listener is bound to a port that the kernel chose and stays open until the store takes it
    over, so no other job can get that port in between, and workers may connect before the store is
    up: they wait in the listener's queue. It lives in its own process because a worker that hosted
    it would take it along when it ends first.

    Args:
        address: where it listens; "" is all addresses of this host.

    Raises:
        OSError: `address` is not one of this host's addresses.
    """

    def __init__(self, address: str) -> None:
        self._listener = wire.listen(address)
        self.address = address or "127.0.0.1"
        self.is_open_to_all = not address
        self.port: int = self._listener.getsockname()[1]
        self.pid = 0
        self._values = -1  # the pipe by which the agent writes into the store

    def start(self, private: Iterable[int]) -> None:
        """Fork the process that serves. Call it after the preload: torch is then imported already.

        `private` are descriptors of the agent; held open in this process they would hide their
        closing from the launcher.
        """
        parent = os.getpid()
        descriptor = self._listener.detach()  # which would be closed in the child
        values, self._values = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(descriptor)
            os.close(values)
            return
        os.close(self._values)
        try:
            os.setsid()
            processes.die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            # A scheduler that signals every process of the job must not take away the store while
            # the workers still save.
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in private:
                os.close(fd)
            self._serve(descriptor, values)
        finally:
            os._exit(0)

    def _serve(self, listener: int, values: int) -> None:
        from torch.distributed import TCPStore

        store = TCPStore(
            self.address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=30),
            master_listen_fd=listener,
        )
        with os.fdopen(values) as lines:
            for line in lines:
                store.set(*json.loads(line))
        while store is not None:
            signal.pause()

    def publish(self, key: str, value: str) -> None:
        """Write a value into the store."""
        os.write(self._values, json.dumps([key, value]).encode() + b"\n")

    def stop(self) -> None:
        """End the store and release its port."""
        self._listener.close()
        if self._values >= 0:
            os.close(self._values)
            self._values = -1
        if self.pid:
            processes.signal_group(self.pid, signal.SIGKILL)
            # Between fork and setsid the group does not exist yet.
            try:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
            self.pid = 0
