"""Each script of the notes asserts its own result; here they only have to end well and say so."""

from __future__ import annotations

import pytest

from tests.examples.running import EXAMPLES, program, run_example, run_in

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.usefixtures("forked_python")]


def test_ddp_with_mp_spawn(tmp_path):
    assert "workers, equal weights; accuracy of the saved model 0.9" in run_example(
        tmp_path, "torch_notes/ddp_spawn.py"
    )


def test_data_parallel(tmp_path):
    assert "split and whole model give the same outputs" in run_example(
        tmp_path, "torch_notes/data_parallel.py"
    )


def check_send_recv(text: str) -> None:
    assert text.count("rank 0 has sent [1.0, -1.0] to rank 1") == 1, text
    assert text.count("rank 1 has received [1.0, -1.0] from rank 0") == 1, text


# rare: the next test runs the script under launchers.
@pytest.mark.rare
def test_send_recv(tmp_path):
    check_send_recv(run_example(tmp_path, "torch_notes/send_recv.py"))


def test_send_recv_under_launchers(tmp_path):
    script = str(EXAMPLES / "torch_notes" / "send_recv.py")
    check_send_recv(run_in(tmp_path, program("allhands"), "launch", "-n", "2", script))
    check_send_recv(
        run_in(tmp_path, program("torchrun"), "--nproc-per-node", "2", "--standalone", script)
    )


@pytest.mark.rare
def test_hand_synchronised(tmp_path):
    text = run_example(tmp_path, "torch_notes/hand_synchronised.py")
    assert "after one epoch, largest difference" in text
    assert "after twenty, accuracy on 2 processes: 0.9" in text
