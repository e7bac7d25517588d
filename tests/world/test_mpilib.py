"""What can be told about MPI without starting it. Starting it is in tests/comm/test_mpi.py."""

from __future__ import annotations

import sys
import types

import pytest

from allhands.errors import UserError, WorldError
from allhands.world import mpilib
from allhands.world.layout import Layout

TWO = Layout(0, 2, environment="torchrun")
SLURM = Layout(1, 2, environment="slurm")


def test_a_missing_mpi4py_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpilib, "mpi4py_installed", lambda: False)
    with pytest.raises(UserError, match="mpi4py, which is not installed: pip install mpi4py mpich"):
        mpilib.load_mpi({})


def test_a_missing_library_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpilib, "mpi4py_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))  # has no MPI in it
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(UserError, match="cannot load an MPI library .*: pip install mpi4py mpich"):
        mpilib.load_mpi({})


@pytest.mark.parametrize("layout", [TWO, SLURM])
def test_a_launcher_that_is_none_of_mpi_is_refused(layout: Layout) -> None:
    with pytest.raises(
        WorldError,
        match=rf"{layout.environment} started the 2 processes.*mpirun -n 2.*--mpi=pmi2.*--mpi=pmix",
    ):
        mpilib.check_launched(layout, {"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"])
def test_a_launcher_of_mpi_is_believed_for_now(name: str) -> None:
    mpilib.check_launched(TWO, {name: "0"})
    mpilib.check_launched(None, {})
    mpilib.check_launched(Layout(0, 1), {})


def test_other_numbers_than_the_worlds_are_an_error() -> None:
    mpilib.check_same(0, 2, TWO)
    with pytest.raises(
        WorldError,
        match="torchrun says rank 0 of 2, but MPI says rank 0 of 1: mpi4py loaded MPICH "
        "5.*MPI4PY_LIBMPI",
    ):
        mpilib.check_same(0, 1, TWO, "MPICH 5")
    with pytest.raises(
        WorldError,
        match="slurm says rank 1 of 2, but MPI says rank 0 of 2: start one process for each MPI "
        "rank",
    ):
        mpilib.check_same(0, 2, SLURM)


def test_the_library_of_the_launcher_is_chosen_unless_the_user_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    monkeypatch.setattr(mpilib, "_loads", lambda path: "/" not in path)

    def chosen(environ: dict[str, str]) -> str | None:
        with mpilib._library_of_launcher(environ):
            import os

            return os.environ.get("MPI4PY_LIBMPI")

    assert chosen({"OMPI_COMM_WORLD_SIZE": "2"}) == "libmpi.so.40"
    assert chosen({"PMI_SIZE": "2"}) == "libmpi.so.12"
    assert chosen({}) is None
    assert chosen({"PMI_SIZE": "2", "MPI4PY_LIBMPI": "/mine"}) is None
    assert chosen({"PMI_SIZE": "2", "MPI4PY_MPIABI": "mpich"}) is None
