"""mpi4py and the MPI library under it: whether they can be used here, and what ends an MPI job when
a rank fails.

Nothing here is imported, and MPI is not started, before somebody needs it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from allhands.errors import UserError, WorldError
from allhands.world.layout import Environ, Layout

# Set by mpirun of Open MPI; by the process managers that MPICH and Intel MPI speak to (mpiexec,
# srun --mpi=pmi2); by PMIx.
_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK")
INSTALL = "pip install mpi4py mpich"

# The launcher passes on what was printed (MPICH's drops what comes with MPI_Abort), and sees first
# that another rank was killed, when the error is only that the connection to it was lost.
_LAST_WORDS_S = 2.0

_hooked = False


def mpi4py_installed() -> bool:
    """Whether mpi4py can be imported. Imports nothing."""
    return importlib.util.find_spec("mpi4py") is not None


def check_launched(layout: Layout | None, environ: Environ) -> None:
    """Raise `WorldError` when what started a world of several processes was no MPI launcher, before
    MPI starts alone."""
    if layout is None or layout.world_size == 1 or any(environ.get(name) for name in _LAUNCHED):
        return
    raise WorldError(
        f"backend='mpi', but {layout.environment} started the {layout.world_size} processes and "
        "MPI knows nothing of it: to MPI each of them is alone. Start them with allhands launch "
        f"--launcher mpi -n {layout.world_size}, with mpirun -n {layout.world_size} (or mpiexec) "
        "python … after an import of allhands, or with srun --mpi=pmi2 (MPICH, Intel MPI) or "
        "srun --mpi=pmix (Open MPI), or write backend='gloo'"
    )


def check_same(rank: int, size: int, layout: Layout | None, library: str = "its library") -> None:
    """Raise `WorldError` when MPI's rank and size are not those of the world."""
    if layout is None or (rank, size) == (layout.rank, layout.world_size):
        return
    hint = (
        f"mpi4py loaded {library}; that library and the mpirun or mpiexec that started the "
        "processes must be of one MPI. MPI4PY_LIBMPI=/PATH/TO/libmpi.so chooses the library"
        if size == 1
        else "start one process for each MPI rank"
    )
    raise WorldError(
        f"{layout.environment} says rank {layout.rank} of {layout.world_size}, but MPI says rank "
        f"{rank} of {size}: {hint}"
    )


def load_mpi(environ: Environ | None = None) -> Any:
    """`mpi4py.MPI`, with the MPI started; of several installed MPI libraries, the one that belongs
    to the launcher.
    """
    if not mpi4py_installed():
        raise UserError(
            f"backend='mpi' needs mpi4py, which is not installed: {INSTALL} (mpich only where "
            "there is no MPI yet)"
        )
    with _library_of_launcher(os.environ if environ is None else environ):
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                "mpi4py is installed, but it cannot load an MPI library "
                f"({str(error).splitlines()[0]}): {INSTALL}, or install Open MPI or MPICH"
            ) from error
    if not MPI.Is_initialized():  # mpi4py.rc.initialize = False
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def check_threads(MPI: Any) -> None:
    """Raise `WorldError` when MPI was started without MPI_THREAD_MULTIPLE, which the threads of the
    backend need."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise WorldError(
            f"backend='mpi' needs MPI_THREAD_MULTIPLE, but {version(MPI)} was started with less. "
            "Remove mpi4py.rc.thread_level (or mpi4py.rc.threads, MPI4PY_RC_THREAD_LEVEL) if it is "
            f"set; otherwise install an MPI that was built with it, as current ones are: {INSTALL}"
        )


def version(MPI: Any) -> str:
    """The name and version of the MPI library, on one line."""
    return " ".join(MPI.Get_library_version().split("\n")[0].rstrip("\0").split())


@contextmanager
def _library_of_launcher(environ: Environ) -> Iterator[None]:
    """Within, mpi4py loads the library of the MPI whose launcher started this process.

    Left alone it takes the first that it finds, in this environment's lib folder before the
    system's: under Debian's mpirun, and with MPICH from a wheel, each process would be a world of
    its own or be ended by the library.
    """
    if environ.get("OMPI_COMM_WORLD_SIZE"):
        launcher = "openmpi"
    elif environ.get("PMI_SIZE"):
        launcher = "mpich"
    else:
        launcher = None
    if (
        launcher is None
        or "mpi4py.MPI" in sys.modules
        or {"MPI4PY_LIBMPI", "MPI4PY_MPIABI"} & environ.keys()
    ):
        yield
        return
    name = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}[launcher]
    found = next(
        (path for path in (str(Path(sys.prefix, "lib", name)), name) if _loads(path)), None
    )
    if found is None:
        yield
        return
    os.environ["MPI4PY_LIBMPI"] = found
    try:
        yield
    finally:
        del os.environ["MPI4PY_LIBMPI"]


def _loads(path: str) -> bool:
    if os.path.dirname(path) and not os.path.exists(path):
        return False
    try:
        ctypes.CDLL(path, os.RTLD_LAZY | os.RTLD_LOCAL)
    except OSError:
        return False
    return True


def end_job_on_error(rank: int, host: str, environ: Environ) -> None:
    """Let an exception that nobody catches end all ranks of the job, after one line that says which
    rank it was and why.

    mpirun of Open MPI does so by itself while MPI is not started. Everywhere else the others would
    go on: a rank that leaves waits in MPI_Finalize for them, and they for it.
    """
    global _hooked
    if _hooked:
        return
    _hooked = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # torch's own hook collects what this one prints and would write it after the process has
        # ended.
        captured = sys.stderr
        if isinstance(captured, io.StringIO) and sys.__stderr__ is not None:
            sys.stderr = sys.__stderr__
        try:
            before(kind, error, trace)
            told = f"{kind.__name__}: {error}".splitlines()[0]
            print(
                f"allhands: rank {rank} on {host} raised {told}; it ends the job",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
        finally:
            sys.stderr = captured
            time.sleep(_LAST_WORDS_S)
            _end_job(environ)

    sys.excepthook = hook


def _end_job(environ: Environ) -> None:
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(1)
    elif environ.get("PMI_FD", "").isdecimal() and not environ.get("SLURM_PROCID"):
        # What MPI_Abort says to Hydra, the process manager of MPICH and Intel MPI.
        with suppress(OSError):
            os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=1\n")
