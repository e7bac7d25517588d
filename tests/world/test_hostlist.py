from __future__ import annotations

import pytest

from allhands.errors import UserError
from allhands.world.hostlist import expand_hosts, expand_tasks


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-3,7],m05", "n1 n2 n3 n7 m05"),
        ("a,b[01-02]", "a b01 b02"),
        ("n[583,752,801]", "n583 n752 n801"),
        ("a[1-2],b07", "a1 a2 b07"),
        ("r[1-2]n[01-03]", "r1n01 r1n02 r1n03 r2n01 r2n02 r2n03"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("gpu-[1-2].cluster.local", "gpu-1.cluster.local gpu-2.cluster.local"),
        ("x[1],y-2", "x1 y-2"),
        ("b02,a01", "b02 a01"),  # the order is Slurm's, not the alphabet's
    ],
)
def test_expands(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize(
    "text", ["", "n[1-2", "n1-2]", "n[2-1]", "n[a-b]", "n[]", "n1,,n2", "n[[1]]", "n[1-9999999]"]
)
def test_refuses_what_is_no_host_list(text: str) -> None:
    with pytest.raises(UserError, match="not a Slurm host list"):
        expand_hosts(text)


def test_task_counts() -> None:
    assert expand_tasks("2(x2),1") == [2, 2, 1]
    assert expand_tasks("4") == [4]
    with pytest.raises(UserError, match=r"2\(x\)"):
        expand_tasks("2(x)")
