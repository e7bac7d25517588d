"""Which part of a host's cores falls to a process, and that torch keeps to it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from allhands.world import cores, cpu_share
from allhands.world.environments.slurm import cpus_of_task
from allhands.world.membership import Member

BASE = Member(0, 1, "a/1", "a", "gloo", "cpu")
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


def members(*places: tuple[str, str]) -> list[Member]:
    return [
        replace(BASE, rank=rank, host=host, cores=mask) for rank, (host, mask) in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("places", "share"),
    [
        ([("a", "f")], 4),
        ([("a", "f"), ("a", "f")], 2),
        ([("a", "f"), ("b", "f")], 4),
        ([("a", "3"), ("a", "c")], 2),  # each bound to cores of its own
        ([("a", "f"), ("a", "c")], 3),
        ([("a", "1"), ("a", "1"), ("a", "1")], 1 / 3),
    ],
)
def test_processes_of_a_host_share_what_they_may_use(places, share):
    assert cpu_share.share_of(members(*places), 0) == pytest.approx(share)


def test_own_mask_has_the_cores_of_this_process():
    mask = int(cores.own_mask(), 16)
    assert mask.bit_count() == cores.cores()
    assert all(mask >> core & 1 for core in os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("variables", "cpus"),
    [
        ({}, None),
        ({"SLURM_CPUS_PER_TASK": "6"}, 6),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}, 2),
        (
            {"SLURM_CPUS_ON_NODE": "6", "SLURM_STEP_TASKS_PER_NODE": "1,3", "SLURM_NODEID": "1"},
            2,
        ),
        ({"SLURM_CPUS_ON_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}, 1),
        ({"SLURM_CPUS_ON_NODE": "8"}, None),
    ],
)
def test_what_slurm_gives_a_task(variables, cpus):
    assert cpus_of_task(STEP | variables) == cpus
    assert cpus_of_task(variables) is None, "no task of srun"


@pytest.fixture
def four_cores(monkeypatch):
    """torch as it is on four cores; its threads are given back."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu_share, "usable_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(cpu_share, "_physical", len)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_threads_follow_the_share_and_are_given_back(four_cores):
    two = members(("a", "f"), ("a", "f"))
    restore = cpu_share.limit_threads(two, 1, {})
    assert torch.get_num_threads() == 2
    assert restore is not None
    restore()
    assert torch.get_num_threads() == 4
    assert cpu_share.limit_threads(two[:1], 0, {}) is None
    assert torch.get_num_threads() == 4


def test_slurm_may_give_less_than_the_node_has(four_cores):
    given = STEP | {"SLURM_CPUS_PER_TASK": "1"}
    assert cpu_share.limit_threads(members(("a", "f")), 0, given) is not None
    assert torch.get_num_threads() == 1


def test_hardware_threads_count_as_torch_counts_them(four_cores, monkeypatch):
    monkeypatch.setattr(cpu_share, "_physical", lambda usable: 2)
    torch.set_num_threads(2)
    cpu_share.limit_threads(members(("a", "f"), ("a", "f")), 0, {})
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_user_has_set_stays(four_cores, variable):
    two = members(("a", "f"), ("a", "f"))
    assert cpu_share.limit_threads(two, 0, {variable: "4"}) is None
    torch.set_num_threads(3)
    assert cpu_share.limit_threads(two, 0, {}) is None
    assert torch.get_num_threads() == 3


def test_a_number_that_is_set_afterwards_is_not_taken_back(four_cores):
    restore = cpu_share.limit_threads(members(("a", "f"), ("a", "f")), 0, {})
    torch.set_num_threads(3)
    assert restore is not None
    restore()
    assert torch.get_num_threads() == 3
