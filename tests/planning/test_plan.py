"""Plans: what fits, what is the fastest, and why the others are not taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import allhands
from allhands import DDP, FSDP, LocalSGD, Pipeline, UserError
from allhands.cli.main import run
from allhands.cli.run_objects import strategy_from
from allhands.cli.shared_options import read_checked
from allhands.models.transformer import GPT, NextToken
from allhands.planning.candidates import Candidate, candidates
from allhands.planning.dry_step import Workload, dry_step
from allhands.planning.machines import card_named
from allhands.planning.measured_profile import MeasuredProfile, write_times
from allhands.planning.operation_times import OperationTimes
from allhands.planning.step_correction import ALONE

SIZES = {"vocab_size": 512, "block_size": 128, "layers": 2, "heads": 8, "width": 256}


def plan(gpus: int, samples: int = 16, sizes: dict[str, int] = SIZES, **options: Any) -> Any:
    with torch.device("meta"):
        model = GPT(**sizes, tied=False)
    batch = torch.zeros(samples, sizes["block_size"], dtype=torch.int64)
    given: dict[str, Any] = {
        "model": model,
        "criterion": NextToken(),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch": (batch, batch),
    }
    return allhands.plan(**(given | options), gpus=gpus)


def test_the_fastest_that_fits_is_first_and_what_does_not_fit_says_why() -> None:
    free = plan(2)
    names = [row.name for row in free.rows]
    exact = {"ddp", "ddp sharded", "fsdp", "kvstore", "tensor", "pipeline"}
    assert set(names) == {*exact, "local_sgd every 32"}
    speeds = [row.samples_per_second for row in free.rows]
    assert speeds == sorted(speeds, reverse=True)
    assert free.best is next(row for row in free.rows if row.exact)
    peaks = {row.name: row.peak for row in free.rows}
    assert peaks["fsdp"] < peaks["ddp sharded"] < peaks["ddp"]

    tight = plan(2, memory=(peaks["fsdp"] + peaks["ddp sharded"]) / 2)
    by_name = {row.name: row for row in tight.rows}
    assert not by_name["ddp"].fits
    assert "of which activations" in by_name["ddp"].why_not or "CUDA" in by_name["ddp"].why_not
    assert by_name["fsdp"].fits
    # Where one does not fit, it is tried with layers that are computed again.
    again = by_name["ddp recompute"]
    assert again.peak < by_name["ddp"].peak
    assert again.seconds.total > by_name["ddp"].seconds.total
    assert again.lines["activation_checkpointing"] is True
    text = str(tight)
    assert "ddp, too large" in text
    assert max(map(len, text.splitlines())) <= 100
    assert yaml.safe_load(tight.run_file()) == tight.best.lines


def test_steps_between_exchanges_are_said_and_another_training_is_not_proposed() -> None:
    rare = Candidate(LocalSGD(every=4), {"name": "local_sgd", "every": 4})
    each = Candidate(LocalSGD(every=1), {"name": "local_sgd", "every": 1})
    ddp = Candidate(DDP(), {"name": "ddp"})
    found = plan(2, link="eth1", strategies=[ddp, rare, each])
    first, *_ = found.rows
    every = {row.name: row for row in found.rows}["local_sgd every 1"]
    assert first.name == "local_sgd every 4"
    assert first.sent == pytest.approx(every.sent / 4)
    # The exchange waits for the slow link once in four steps.
    assert first.seconds.waiting == pytest.approx(every.seconds.waiting / 4, rel=0.01)
    assert first.note.startswith("25 % of the steps exchange weights")
    assert not first.exact
    assert found.best.name == "ddp"
    assert "which trains as one process does (unlike local_sgd every 4" in str(found)
    only = plan(2, strategies=[rare])
    assert only.best is only.rows[0]


def test_an_exchange_beside_steps_is_waited_for_where_they_are_shorter() -> None:
    def row(link: str, **options: Any) -> Any:
        strategy = LocalSGD(every=8, **options)
        return plan(2, link=link, strategies=[Candidate(strategy, {"name": "local_sgd"})]).rows[0]

    beside = {"overlap": 6, "mix": 0.5}
    waits, hides = row("eth1"), row("eth1", **beside)
    assert hides.sent == waits.sent
    # What takes longer than six steps holds the last of them up.
    others = hides.seconds.total - hides.seconds.waiting
    beyond = 8 * waits.seconds.waiting - 6 * others
    assert beyond > 0
    assert hides.seconds.waiting == pytest.approx(beyond / 8, rel=0.05)
    # What does not is hidden, but for a gathering of the samples that were seen.
    assert row("nvlink", **beside).seconds.waiting < row("nvlink").seconds.waiting / 2


def test_where_nothing_fits_it_says_what_comes_closest() -> None:
    none = plan(2, memory="10MB", strategies=[Candidate(DDP(), {"name": "ddp"})])
    assert none.best is None
    assert none.run_file() == ""
    assert "nothing fits; " in str(none)
    assert "comes closest with" in str(none)


def test_several_hosts_have_products_of_strategies() -> None:
    by_name = {row.name: row for row in plan(4, per_host=2).rows}
    assert {"mesh replicate 2 shard 2", "mesh dp 2 tp 2", "pipeline"} <= set(by_name)
    assert by_name["pipeline"].seconds.bubble > 0
    # Slower links between hosts hold up what crosses them.
    ddp = Candidate(DDP(), {"name": "ddp"})
    (slow,) = plan(4, per_host=2, link="nvlink+eth1", strategies=[ddp]).rows
    assert slow.seconds.total > 2 * by_name["ddp"].seconds.total
    assert slow.sent == by_name["ddp"].sent


def test_a_model_that_no_strategy_takes_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="gpus"):
        plan(0)

    class Rows(allhands.SupervisedRunner):
        def rows_of(self, batch: Any) -> int | None:
            return None

    with pytest.raises(UserError, match="override rows_of"):
        plan(2, runner=Rows())


def test_a_model_that_computes_in_bf16_throughout_takes_less() -> None:
    ways = [Candidate(one, {"name": one.name}) for one in (DDP(), FSDP())]
    given = {
        name: {row.name: row for row in plan(2, precision=name, strategies=ways).rows}
        for name in ("bf16", "bf16-true")
    }
    assert given["bf16-true"]["ddp"].memory["activations"] < (
        0.9 * given["bf16"]["ddp"].memory["activations"]
    )
    assert "write FSDP(param_dtype='bf16')" in given["bf16-true"]["fsdp"].refused


def test_measured_operations_are_used_and_kept(tmp_path: Path) -> None:
    times = OperationTimes(card_named("h100"), device=torch.device("cpu"))
    first = plan(1, times=times)
    assert times.known
    assert not times.by_peaks
    assert f"times by {len(times.known)} measured operations" in str(first)
    path = tmp_path / "cpu.json"
    write_times(path, times)
    again = MeasuredProfile(path).times(card_named("h100"))
    second = plan(1, times=again)
    assert second.rows[0].seconds == first.rows[0].seconds
    for text in ("{}", "[]", "no", '{"operations": [1]}'):
        path.write_text(text)
        with pytest.raises(UserError, match="has no measured operations"):
            MeasuredProfile(path).operations()
    with pytest.raises(UserError, match="is not there"):
        MeasuredProfile(tmp_path / "other.json")


def test_a_plan_by_several_processes_is_the_same() -> None:
    alone, several = plan(4), plan(4, processes=2)
    assert several.to_dict() == alone.to_dict()


def test_a_convolution_net_with_dropout_and_batch_norm() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(8 * 36, 4),
    )
    found = allhands.plan(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        batch=(torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)),
        gpus=2,
        precision="bf16",
        clip_norm=1.0,
    )
    by_name = {row.name: row for row in found.rows}
    assert "Tensor() has no plan for a Sequential" in by_name["tensor"].refused
    assert by_name["ddp"].fits
    weights = sum(p.nbytes for p in model.parameters())
    assert by_name["ddp"].sent == pytest.approx(weights, rel=0.05)


def test_the_command_plans_a_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--gpus", "2", "--card", "a100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 2
    assert {row["strategy"] for row in found["rows"]} >= {"ddp", "fsdp"}
    assert run(["plan", "--gpus", "2", "--card", "a1000"]) == 2
    assert "did you mean 'a100'?" in capsys.readouterr().err


def test_the_command_takes_no_measurements_of_another_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"device": "NVIDIA H200", "torch": "2.13", "operations": {}, "own": {}}')
    assert run(["plan", "--gpus", "2", "--profile", str(path)]) == 0
    assert "2 x h100" in capsys.readouterr().out  # no operation was measured
    path.write_text(path.read_text().replace('"operations": {}', '"operations": {"add": 1e-6}'))
    assert run(["plan", "--gpus", "2", "--profile", str(path)]) == 0
    assert "2 x h200" in capsys.readouterr().out
    assert run(["plan", "--gpus", "2", "--card", "a100", "--profile", str(path)]) == 2
    assert "were measured on NVIDIA H200, and the plan is for a100" in capsys.readouterr().err
    with pytest.raises(UserError, match="the times are of h200, and the plan is for h100"):
        plan(2, times=OperationTimes(card_named("h200")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures on the GPU")
def test_a_processor_is_not_measured_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--gpus", "2", "--measure"]) == 2
    assert "measured on a processor say nothing of h100" in capsys.readouterr().err


def test_processors_are_planned_by_real_steps_and_measured_operations(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'cpu' has no published peaks; write --measure"):
        plan(2, card="cpu")
    times = OperationTimes(card_named("cpu"), device=torch.device("cpu"))
    ways = [DDP(), FSDP(), Pipeline()]
    strategies = [Candidate(one, {"name": one.name}) for one in ways]
    small = {"vocab_size": 128, "block_size": 64, "layers": 4, "heads": 4, "width": 128}
    options = {"card": "cpu", "link": "eth1", "times": times, "strategies": strategies}
    found = plan(2, 4, small, **options)
    by_name = {row.name: row for row in found.rows}
    assert times.correction != ALONE
    for row in found.rows:
        assert row.seconds.compute > 0
        assert row.memory["process"] > 0
    # Neither CUDA nor its libraries take memory there, and gathers hold the thread up.
    assert "CUDA and NCCL" not in by_name["ddp"].memory
    assert by_name["fsdp"].seconds.waiting > by_name["ddp"].seconds.waiting
    assert set(times.own) == {"fsdp"}
    assert by_name["fsdp"].seconds.compute > times.own["fsdp"] >= 0
    assert by_name["pipeline"].seconds.bubble > 0
    path = tmp_path / "cpu.json"
    path.write_text('{"links": {"between": {}}}')
    write_times(path, times)
    again = MeasuredProfile(path).times(times.card)
    assert again.correction == times.correction
    assert again.own == times.own
    assert json.loads(path.read_text())["links"] == {"between": {}}


def read(path: Path, text: str) -> Any:
    path.write_text(text)
    return read_checked([path], [])


@pytest.mark.parametrize("gpus", [2, 16])
def test_a_run_file_takes_the_lines_of_each_way(gpus: int, tmp_path: Path) -> None:
    for way in candidates(gpus, 8, servers=2):
        read_back = strategy_from(read(tmp_path / "run.yml", yaml.safe_dump(way.sections)))
        assert type(read_back) is type(way.strategy)
        assert Candidate(read_back, way.lines).degrees(gpus) == way.degrees(gpus)


def test_the_run_files_own_way_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "run.yml"
    own.write_text("mesh: {tp: 3, dp: 2}\nactivation_checkpointing: true\n")
    assert run(["plan", "-C", str(own), "--gpus", "2"]) == 0
    said = capsys.readouterr().out
    assert "mesh dp 2 tp 3 recompute: mesh: pp 1 x dp 2 x tp 3 = 6, but there are 2 work" in said
    own.write_text("strategy: {name: ddp, bucket_cap_mb: 5}\n")
    assert run(["plan", "-C", str(own), "--gpus", "2"]) == 0
    assert "ddp bucket_cap_mb 5 " in capsys.readouterr().out


class AsksForNumbers(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[(x > 0).any(1).nonzero().flatten()])


def test_a_model_that_needs_numbers_is_refused_by_the_line_that_asks_for_them() -> None:
    model = AsksForNumbers(8, 8)
    with pytest.raises(UserError, match=r"test_plan.py:\d+ \(return super.*what depends on the"):
        allhands.plan(
            model=model,
            criterion=nn.MSELoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            batch=(torch.ones(4, 8), torch.ones(4, 8)),
            gpus=1,
        )


def test_a_card_that_is_nearly_full_is_told() -> None:
    ddp = [Candidate(DDP(), {"name": "ddp"})]
    (row,) = plan(2, strategies=ddp).rows
    assert "fills" not in str(plan(2, strategies=ddp))
    assert "ddp: fills 96 % of a GPU" in str(plan(2, strategies=ddp, memory=row.peak / 0.96))


def test_a_stage_between_the_first_and_the_last_may_be_the_fullest() -> None:
    pipeline = Candidate(Pipeline(), {"name": "pipeline"})
    with torch.device("meta"):
        # Embedding and head take the place of layers in the first and the last stage.
        model = GPT(**SIZES | {"vocab_size": 4096, "layers": 6, "width": 128}, tied=False)
    batch = torch.zeros(16, 128, dtype=torch.int64)
    given: dict[str, Any] = {
        "model": model,
        "criterion": NextToken(),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batch": (batch, batch),
        "step": "eager",
    }
    (row,) = plan(3, **given, strategies=[pipeline]).rows
    workload = Workload(**given, samples=16, runner=allhands.SupervisedRunner())
    peaks = [dry_step(workload, pipeline.strategy, 3, rank).peak for rank in range(3)]
    assert peaks[1] > max(peaks[0], peaks[2]), peaks
    beside = row.memory["libraries"] + row.memory["CUDA and NCCL"]
    assert row.peak - beside == pytest.approx(max(peaks), rel=0.003)
