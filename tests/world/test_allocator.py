"""Freed memory is kept for the next step."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from allhands.world.allocator import keep_freed_memory

CODE = """
import resource, torch, allhands
allhands.init(device="cpu")
def step():
    return sum(float(torch.ones(1 << 21)[0]) for _ in [torch.ones(1 << 21) for _ in range(4)])
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""
PAGES = 10 * 4 * (1 << 23) // 4096  # that ten steps fill


def faults(**more: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **more},
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_step_finds_the_memory_of_the_one_before_unless_a_variable_says_how_much_is_kept():
    assert faults() < PAGES / 4
    assert faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > PAGES / 2


def test_who_has_set_a_threshold_keeps_it():
    for name, value in (
        ("MALLOC_TRIM_THRESHOLD_", "1"),
        ("MALLOC_TOP_PAD_", "1"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=3"),
    ):
        assert not keep_freed_memory({name: value})
