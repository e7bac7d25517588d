"""Who failed first, from times that arrive in any order."""

from __future__ import annotations

import signal

import pytest

from allhands.launch.worker_report import Worker, describe, describe_stop, first_of


def first(*workers: Worker) -> int | None:
    found = first_of(workers)
    return None if found is None else found.rank


def test_the_raise_counts_not_the_end_of_the_process() -> None:
    slow = Worker(
        0, "h", raised={"text": "ValueError"}, raised_at=10.0, exit={"code": 1}, exit_at=14.0
    )
    quick = Worker(
        1, "h", raised={"text": "RuntimeError"}, raised_at=10.1, exit={"code": 1}, exit_at=10.2
    )
    assert first(quick, slow) == 0


def test_a_kill_precedes_the_broken_connections_that_it_causes() -> None:
    peer = Worker(0, "h", raised={"text": "Connection reset by peer"}, raised_at=10.0)
    killed = Worker(1, "h", exit={"signal": int(signal.SIGKILL)}, exit_at=10.01)
    assert first(peer, killed) == 1


def test_a_broken_connection_is_no_first_failure_where_news_of_another_is_late() -> None:
    peer = Worker(0, "d1", raised={"text": "RuntimeError: Connection closed by peer"})
    peer.raised_at = 10.0
    cause = Worker(1, "d2", leaving=3, leaving_at=12.5, exit={"code": 3}, exit_at=12.5)
    assert first(peer, cause) == 1
    assert first(peer) == 0
    said = describe(cause, [peer, cause], None, 5.0, with_traceback=False)
    assert "rank 1 (d2) failed first: exit code 3" in said
    assert "failed after it: rank 0" in said


def test_an_abort_may_be_the_answer_to_a_broken_connection() -> None:
    raised = Worker(0, "h", raised={"text": "ValueError"}, raised_at=10.0)
    aborted = Worker(1, "h", exit={"signal": int(signal.SIGABRT)}, exit_at=10.01)
    assert first(raised, aborted) == 0


def test_what_happens_after_a_stop_is_not_a_failure() -> None:
    raised = Worker(
        0, "h", raised={"text": "ValueError"}, raised_at=10.0, exit={"code": 1}, exit_at=10.5
    )
    stopped = Worker(
        1, "h", stop_at=10.1, own_end=False, exit={"signal": int(signal.SIGKILL)}, exit_at=15.2
    )
    polite = Worker(2, "h", stop_at=10.1, raised={"text": "Terminated"}, raised_at=10.2)
    assert [worker.failed_at() for worker in (stopped, polite)] == [None, None]
    assert first(raised, stopped, polite) == 0


def test_an_end_that_is_seen_only_after_the_stop_may_be_its_own() -> None:
    peer = Worker(0, "h", raised={"text": "Connection reset by peer"}, raised_at=10.0)
    killed = Worker(1, "h", stop_at=10.02, exit={"signal": int(signal.SIGKILL)}, exit_at=10.03)
    assert first(peer, killed) == 1


def test_exit_0_is_a_failure_only_for_a_function() -> None:
    assert Worker(0, "h", exit={"code": 0}, exit_at=1.0).failed_at() is None
    assert Worker(0, "h", exit={"code": 0}, exit_at=9.0, must_return=True).failed_at() == 8.0
    assert (
        Worker(0, "h", exit={"code": 0}, must_return=True, returned={"value": 1}).failed_at()
        is None
    )


@pytest.mark.parametrize(
    ("worker", "code"),
    [
        (Worker(0, "h", exit={"code": 3}), 3),
        (Worker(0, "h", exit={"signal": 11}), 139),
        (Worker(0, "h", raised={"text": "E"}, exit={"code": 1}), 1),
        (Worker(0, "h", raised={"text": "E"}, stop_at=1.0, exit={"signal": 9}), 1),
        (Worker(0, "h", exit={"code": 0}, must_return=True), 1),
        (Worker(0, "h", leaving=3, exit={"signal": 9}), 3),
        (Worker(0, "h", silent={"state": "T", "seconds": 5.0}, exit={"signal": 15}), 137),
        (Worker(0, "h", lost="no word"), 137),
    ],
)
def test_exit_code(worker: Worker, code: int) -> None:
    assert worker.exit_code() == code


def test_report_names_rank_host_cause_lines_and_the_stopped() -> None:
    bad = Worker(
        1, "node7", pid=42, exit={"code": 3}, exit_at=10.0, tail=[b"about to fail", b"\xff"]
    )
    stopped = Worker(0, "node7", stop_at=10.0, own_end=False, exit={"signal": 9}, exit_at=15.0)
    early = Worker(2, "node7", exit={"code": 0}, exit_at=5.0)
    text = describe(bad, [stopped, bad, early], "logs/rank-1.log", 5.0, with_traceback=False)
    assert text.splitlines() == [
        "allhands: rank 1 (node7, pid 42) failed first: exit code 3",
        "  rank 2 had already left with exit code 0, 4.0 s earlier: if the others still waited for "
        "it, that is the cause",
        "  its last lines:",
        "    | about to fail",
        "    | \\xff",
        "  stopped because of it: rank 0; rank 0 did not end within 5 s of SIGTERM and got SIGKILL",
        "  everything it printed: logs/rank-1.log",
    ]


def test_a_package_whose_calls_are_here_is_answered_with_how_to_have_them() -> None:
    for package, instead in {
        "horovod": "start it with allhands launch --horovod",
        "catalyst": "from allhands.catalyst import",
        "coala": "import allhands.federated as coala",
        "mxnet": "from allhands import kvstore as kv",
    }.items():
        text = f"ModuleNotFoundError: No module named '{package}'"
        one = Worker(0, "node7", pid=42, raised={"text": text}, raised_at=1.0)
        assert instead in describe(one, [one], None, 5.0, with_traceback=False).splitlines()[1]


def test_an_abort_after_the_end_is_told_as_what_it_is() -> None:
    worker = Worker(
        1, "h", leaving=0, leaving_at=9.0, exit={"signal": int(signal.SIGABRT)}, exit_at=9.5
    )
    assert (
        worker.cause()
        == "had finished with exit code 0, then SIGABRT ended it while Python shut down"
    )
    assert worker.exit_code() == 128 + signal.SIGABRT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_leaving_with_the_code_of_a_request_is_no_failure(number: signal.Signals) -> None:
    code = 128 + number
    function = Worker(0, "h", leaving=code, exit={"code": code}, must_return=True)
    program = Worker(1, "h", exit={"code": code})
    assert [(one.stopped_after(), one.failed_at()) for one in (function, program)] == [
        (number, None)
    ] * 2


def test_other_ends_are_no_answer_to_a_request() -> None:
    killed = Worker(0, "h", exit={"signal": int(signal.SIGTERM)}, exit_at=9.0)
    interrupted = Worker(1, "h", leaving=130, leaving_at=8.5, exit={"code": 130}, exit_at=9.0)
    raised = Worker(
        2, "h", raised={"text": "OSError"}, raised_at=8.5, exit={"code": 143}, exit_at=9.0
    )
    assert [one.stopped_after() for one in (killed, interrupted, raised)] == [None] * 3
    assert [one.failed_at() for one in (killed, interrupted, raised)] == [8.0, 8.5, 8.5]


def test_the_end_of_a_job_on_request_is_one_line() -> None:
    ended = Worker(0, "h", exit={"code": 143})
    killed = Worker(1, "h", stop_at=5.0, exit={"signal": int(signal.SIGKILL)})
    assert describe_stop(15, [ended], True) == "allhands: stopped by SIGTERM; no worker is left"
    assert describe_stop(10, [ended, killed], False) == (
        "allhands: the workers stopped after SIGUSR1; rank 1 had not ended in time and got "
        "SIGKILL; no worker is left"
    )


def test_a_failure_that_did_not_end_the_job_is_told_apart() -> None:
    earlier = Worker(
        1, "h", raised={"text": "ValueError"}, raised_at=10.0, exit={"code": 1}, exit_at=10.5
    )
    server = Worker(-1, "h", exit={"signal": 9}, exit_at=30.0)
    later = Worker(0, "h", raised={"text": "no server"}, raised_at=29.5)
    lines = describe(server, [later, earlier, server], None, 5.0, with_traceback=False).splitlines()
    assert lines[1:] == [
        "  failed before it, which did not end the job: rank 1",
        "  failed after it: rank 0",
    ]
