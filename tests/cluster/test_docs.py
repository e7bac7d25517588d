"""The commands that the pages of the launchers show do what the pages say."""

from __future__ import annotations

import os

import pytest

from tests.cluster import slurm
from tests.cluster.hosts import DISK, Hosts
from tests.cluster.launching import shared_folder
from tests.pages import run_page


# rare: test_ssh.py has its commands.
@pytest.mark.rare
def test_the_page_about_ssh(hosts: Hosts) -> None:
    assert run_page("ssh.md", shared_folder(hosts, "docs"), hosts.environ()) >= 4
    assert hosts.left(5) == []
    for host in hosts.names:
        assert "train.py" in hosts.run(host, "ls", f"{DISK}/job")


@pytest.mark.rare
def test_the_page_about_slurm() -> None:
    if reason := slurm.why_not():
        pytest.skip(reason)
    # The tutorial asks for three GPUs a node; these are device files only, which torch does not
    # see.
    with slurm.Slurm(("d1", "d2"), label=f"docs-{os.getpid()}", gpus=3) as cluster:
        assert run_page("slurm.md", shared_folder(cluster, "docs"), cluster.environ()) >= 6
        assert cluster.left(5) == []
