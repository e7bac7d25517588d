"""The MPI launchers of this machine, and how each is called: Debian's Open MPI, and MPICH from PyPI
beside this Python.

for mpi in launchers():
    subprocess.run(mpi.argv(2, ["python", "script.py"]), env=mpi.environ(), check=True)
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.cluster.machine import FOREIGN, SYSTEM_PATH

NAMES = ("openmpi", "mpich")
VENV = Path(sys.prefix)


@dataclasses.dataclass(frozen=True)
class Mpi:
    """An MPI launcher.

    Attributes:
        name: "openmpi" or "mpich".
        program: Its mpirun or mpiexec.
        library: The MPI library that belongs to it; mpi4py takes MPICH's by itself where both are
            installed.
    """

    name: str
    program: Path
    library: Path

    def argv(self, ranks: int, command: Sequence[str], hosts: Hosts | None = None) -> list[str]:
        """The command that starts the ranks: on this machine, or spread evenly over all hosts, one
        block a host.

        Args:
            ranks: How many in all; with hosts, a multiple of their number.
            command: A program and its arguments.
            hosts: Where. The environment must be that of `environ` with the same hosts.
        """
        if hosts is not None and ranks % len(hosts.names):
            raise ValueError(f"{ranks} ranks cannot be spread evenly over {len(hosts.names)} hosts")
        each = ranks // len(hosts.names) if hosts else 0
        words = [str(self.program), "-n", str(ranks)]
        if self.name == "openmpi":
            words += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            if hosts:
                slots = ",".join(f"{name}:{each}" for name in hosts.names)
                # The names of ranks' own hosts lead to 127.0.1.1, and the driver has other
                # interfaces that no host can reach.
                subnet = f"{hosts.driver_address.rpartition('.')[0]}.0/24"
                words += ["--host", slots, "--mca", "plm_rsh_agent", f"{hosts.folder}/bin/ssh"]
                words += [
                    "--mca",
                    "btl_tcp_if_include",
                    subnet,
                    "--mca",
                    "oob_tcp_if_include",
                    subnet,
                ]
        elif hosts:
            words += ["-hosts", ",".join(hosts.names), "-ppn", str(each), "-iface", hosts.bridge]
            words += ["-launcher", "ssh", "-launcher-exec", f"{hosts.folder}/bin/ssh"]
        return [*words, *command]

    def environ(
        self, hosts: Hosts | None = None, *, choose_library: bool = True, **extra: str
    ) -> dict[str, str]:
        """The environment in which the launcher runs; its ranks get it too.

        Args:
            hosts: Those of `argv`.
            choose_library: Tell mpi4py which library belongs to the launcher. Without, it is to be
                found out.
            extra: More variables.
        """
        if hosts:
            own = hosts.environ()
        else:
            own = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
            own["PATH"] = f"{VENV}/bin:{own.get('PATH', SYSTEM_PATH)}"
        if self.name == "mpich":
            # UCX takes two hosts from namespaces for one, and hangs.
            own["MPIR_CVAR_CH4_NETMOD"] = "ofi"
        if choose_library:
            own["MPI4PY_LIBMPI"] = str(self.library)
        # Its ranks on other hosts get no other variables than those that are named.
        if hosts and self.name == "openmpi":
            own["OMPI_MCA_mca_base_env_list"] = ";".join(
                [*(["MPI4PY_LIBMPI"] if choose_library else []), *extra]
            )
        return {**own, **extra}


@functools.cache
def launcher(name: str) -> Mpi | str:
    """The launcher with this name, or why there is none, in words for a skipped test."""
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is missing (pip install mpi4py)"
    if name == "mpich":
        program, library = VENV / "bin/mpiexec", VENV / "lib/libmpi.so.12"
        if not program.exists() or not library.exists():
            return f"there is no MPICH in {VENV} (pip install mpich)"
        return Mpi(name, program, library)
    found = shutil.which("mpirun.openmpi", path=SYSTEM_PATH)
    libraries = sorted(
        Path("/usr/lib").glob("*-linux-gnu/libmpi.so.*"), key=lambda path: len(path.name)
    )
    libraries = [
        path
        for path in libraries
        if re.fullmatch(r"libmpi\.so\.[0-9]+", path.name) and path.name != "libmpi.so.12"
    ]
    if not found or not libraries:
        return "there is no Open MPI (Debian: apt-get install openmpi-bin)"
    return Mpi(name, Path(found), libraries[0])


def launchers() -> list[Mpi]:
    """All launchers that are here."""
    return [found for found in map(launcher, NAMES) if isinstance(found, Mpi)]
