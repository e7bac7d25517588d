"""Where a fork of `tests/fork_server.py` is: on the host of its client, which may be one of
tests/cluster."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct


class Host:
    """The namespaces of a client: those of this process, or of a host of tests/cluster."""

    KINDS = ("ipc", "uts", "net", "mnt")  # the last one changes what paths mean

    def __init__(self, client: socket.socket) -> None:
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack(
            "3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        self.namespaces = {
            kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
            for kind in ("pid", *self.KINDS)
            if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
        }
        self.is_other = "pid" in self.namespaces

    def fork(self) -> int:
        """Fork a process that is one of the host's."""
        if not self.is_other:
            return os.fork()
        own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        _set_namespace(self.namespaces["pid"])  # that of children
        pid = os.fork()
        if pid > 0:
            _set_namespace(own)
        os.close(own)
        return pid

    def enter(self) -> None:
        """Have the network, name and files of the host in this process."""
        for kind in self.KINDS:
            if kind in self.namespaces:
                _set_namespace(self.namespaces[kind])
        platform.uname.__globals__["_uname_cache"] = None
        self.close()

    def close(self) -> None:
        for namespace in self.namespaces.values():
            os.close(namespace)


def _set_namespace(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")
