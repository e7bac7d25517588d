"""The sections `strategy` and `mesh` of a run file, as one strategy."""

from __future__ import annotations

from typing import Any

import pytest

from allhands.cli.run_objects import strategy_from
from allhands.config import read_run
from allhands.errors import UserError
from allhands.strategies import DDP, FSDP, Mesh, Strategy


def strategy(*overrides: str) -> Strategy:
    return strategy_from(read_run((), overrides))


def mesh(*overrides: str) -> Mesh:
    made = strategy(*overrides)
    assert isinstance(made, Mesh)
    return made


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        strategy(*overrides)
    return str(caught.value)


def test_without_a_mesh_a_strategy_has_all_workers():
    assert isinstance(strategy(), DDP)
    made = strategy(
        "strategy=fsdp", "strategy.wrap=[Layer, Embedding]", "strategy.param_dtype=bf16"
    )
    assert isinstance(made, FSDP)
    assert (made.wrap, made.param_dtype) == (["Layer", "Embedding"], "bf16")
    assert made.degrees_for(3).shard == 3


@pytest.mark.parametrize(
    ("overrides", "degrees"),
    [
        (["strategy=ddp", "mesh.dp=4"], (1, 4, 1, 1)),
        (["strategy=fsdp", "mesh.dp=4"], (1, 1, 4, 1)),
        (["strategy=ddp", "mesh.dp=4", "strategy.fsdp={}"], (1, 1, 4, 1)),
        (["strategy=tensor", "mesh.dp=4", "mesh.tp=2"], (1, 4, 1, 2)),
        (["strategy=fsdp", "mesh.dp={replicate: 2, shard: 4}", "mesh.pp=3"], (3, 2, 4, 1)),
        (["strategy=ddp", "mesh.dp.shard=4"], (1, 1, 4, 1)),
        (["strategy=pipeline", "mesh={pp: 2, dp: 2, tp: 2}", "mesh.tp=1"], (2, 2, 1, 1)),
    ],
)
def test_degrees(overrides: list[str], degrees: tuple[int, ...]):
    made = mesh(*overrides)
    assert tuple(made.degrees_for(0)) == degrees
    made.check_size(made.size_wanted() or 0)


def test_each_part_has_its_own_settings():
    made = mesh(
        "strategy={name: fsdp, wrap: Layer, tensor: {plan: gpt, sequence_parallel: true}, "
        "pipeline: {microbatches: 4}}",
        "mesh={pp: 2, dp: 2, tp: 2}",
    )
    assert made.fsdp is not None
    assert made.tensor is not None
    assert made.pipeline is not None
    assert made.fsdp.wrap == ["Layer"]
    assert (made.tensor.plan, made.tensor.sequence_parallel, made.pipeline.microbatches) == (
        "gpt",
        True,
        4,
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mesh.tp=0"], "mesh.tp = 0: it must be greater than or equal to 1"),
        (["mesh.dp=true"], "dp is True; it must be a whole number of at least 1"),
        (["mesh.dp.shards=2"], "has no 'shards'; write dp: {replicate: 2, shard: 4}"),
        (["mesh.ep=2"], "mesh.ep = 2: there is no such key"),
        (
            ["mesh.tp=2", "strategy=kvstore"],
            "kvstore has no mesh; remove it, or set strategy.name to ddp or fsdp",
        ),
        (
            ["strategy=fsdp", "strategy.tensor.plan=gpt"],
            "on a mesh only; write mesh: {tp: 2, …}, or remove it",
        ),
        (["strategy.fsdp={}"], "strategy.fsdp: ddp has no such option"),
        (
            ["strategy=fsdp", "mesh.dp=2", "strategy.fsdp.wrap=Layer"],
            "stand beside its name already; remove this section",
        ),
        (
            ["mesh.dp=2", "strategy.bucket_cap_mb=5"],
            "copies of the model have no settings; remove it, or set mesh to null",
        ),
        (
            ["strategy=fsdp", "mesh.dp=2", "strategy.tensor=gpt"],
            "strategy.tensor = 'gpt': it must be keys and values",
        ),
        (
            ["strategy=fsdp", "mesh.dp=2", "strategy.tensor.plans=gpt"],
            "strategy.tensor.plans = 'gpt': tensor has no such option",
        ),
        (["strategy=fsdp", "strategy.warp=Layer"], "did you mean 'wrap'?"),
        (
            ["strategy=fsdp", "strategy.param_dtype=bf17"],
            "must be one of 'fp32', 'bf16', 'fp16', or None",
        ),
        (
            ["strategy=fsdp", "strategy.cpu_offload=1"],
            "strategy.cpu_offload = 1: it must be true or false",
        ),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(overrides: list[str], said: str):
    assert said in refused(*overrides)


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (
            4,
            "mesh: pp 2 x dp 2 x tp 2 = 8, but there are 4 workers; set dp to 1, or start 8 "
            "(workers=8)",
        ),
        (6, "mesh: pp 2 x dp 2 x tp 2 = 8, but there are 6 workers; start 8 (workers=8)"),
        (1, "but there is 1 worker; start 8"),
    ],
)
def test_degrees_that_do_not_multiply_to_the_workers(workers: int, said: str):
    with pytest.raises(UserError) as caught:
        mesh("mesh={pp: 2, dp: 2, tp: 2}").check_size(workers)
    assert said in str(caught.value)


def test_a_mesh_of_other_things():
    wrong: Any = {"shard": 2.5}
    with pytest.raises(UserError, match=r"dp\.shard is 2\.5"):
        Mesh(dp=wrong)
    with pytest.raises(UserError, match=r"write tensor=Tensor\(\)"):
        Mesh(tp=2, tensor="gpt")  # type: ignore[arg-type]
