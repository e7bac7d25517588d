from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from allhands.comm.clipping import clip_factor
from allhands.errors import UserError
from allhands.kvstore import KVStore, Share, create
from allhands.kvstore.local_keys import LocalKeys


def store_of(**values: torch.Tensor) -> KVStore:
    store = create("local")
    store.init(list(values), list(values.values()))
    return store


def test_a_push_is_assigned_and_each_pull_is_a_copy() -> None:
    store = store_of(a=torch.ones(2, 3), b=torch.zeros(4))
    assert (store.rank, store.num_workers, store.type) == (0, 1, "local")
    assert torch.equal(store.pull("a"), torch.ones(2, 3))
    store.push("a", [torch.full((2, 3), 2.0), torch.full((2, 3), 5.0)])  # of two devices
    a, b = store.pull(["a", "b"])
    assert torch.equal(a, torch.full((2, 3), 7.0))
    assert torch.equal(b, torch.zeros(4))
    a.zero_()
    outs = [torch.empty(2, 3), torch.empty(2, 3)]
    store.pull("a", out=outs)
    assert all(torch.equal(out, torch.full((2, 3), 7.0)) for out in outs)
    values = torch.arange(4.0)
    store.pushpull("b", values, out := torch.empty(4))
    assert torch.equal(out, values)
    store.broadcast("c", torch.ones(1), out := torch.empty(1))
    assert out.item() == 1.0


def test_what_is_pushed_stays_as_it_is() -> None:
    store = store_of(a=torch.zeros(3))
    store.set_optimizer("sgd", lr=1.0)
    gradient = torch.tensor([1.0, 2.0, 3.0])
    store.push("a", gradient, weight=4)
    assert store.pull("a").tolist() == [-0.25, -0.5, -0.75]
    out = {"a": torch.empty(3)}
    store.update({"a": gradient}, out, Share(4.0, 1.0), clip_norm=0.1)
    assert gradient.tolist() == [1.0, 2.0, 3.0]


def test_options_and_clipping_of_a_step() -> None:
    store = store_of(a=torch.zeros(1), b=torch.zeros(1))
    store.set_optimizer("sgd", lr=1.0)
    out = {"a": torch.empty(1), "b": torch.empty(1)}
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    step = store.update(grads, out, Share(2.0, 1.0), [{"lr": 0.5}], clip_norm=1.0)
    assert (step.number, step.workers, step.staleness) == (1, 1, 0.0)
    assert out["a"].item() == pytest.approx(-0.3, abs=1e-6)  # half of 3/5
    assert out["b"].item() == pytest.approx(-0.4, abs=1e-6)
    store.update(grads, out, Share(), clip_norm=100.0)  # the lr stays, the bound is not reached
    assert out["a"].item() == pytest.approx(-1.8, abs=1e-6)


def test_bound_of_a_norm_that_is_no_number() -> None:
    assert clip_factor(4.0, 1.0) == 1.0 / (2.0 + 1e-6)
    assert clip_factor(4.0, 3.0) == 1.0
    assert clip_factor(math.inf, 1.0) == 0.0
    assert math.isnan(clip_factor(math.nan, 1.0))


def test_groups_have_their_own_options() -> None:
    store = create("device")
    store.declare({"a": torch.zeros(2), "b": torch.zeros(2)}, groups={"b": 1})
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    from allhands.kvstore.optimizers import spec_of_torch

    spec, _ = spec_of_torch(
        torch.optim.SGD([{"params": params[:1], "lr": 1.0}, {"params": params[1:], "lr": 0.5}])
    )
    store.set_optimizer(spec)
    out = {"a": torch.empty(2), "b": torch.empty(2)}
    store.update({"a": torch.ones(2), "b": torch.ones(2)}, out, Share())
    assert (out["a"][0].item(), out["b"][0].item()) == (-1.0, -0.5)
    store.update({"a": torch.ones(2), "b": torch.ones(2)}, out, Share(), [{"lr": 0.0}, {"lr": 1.0}])
    assert (out["a"][0].item(), out["b"][0].item()) == (-1.0, -1.5)


def test_dtypes_live_side_by_side() -> None:
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    store = create("local")
    store.init([str(kind) for kind in kinds], [torch.zeros(3, dtype=kind) for kind in kinds])
    store.set_optimizer("sgd", lr=0.5)
    out = {str(kind): torch.empty(3, dtype=kind) for kind in kinds}
    store.update({str(kind): torch.ones(3, dtype=kind) for kind in kinds}, out, Share())
    for kind in kinds:
        assert out[str(kind)].tolist() == [-0.5] * 3


def test_states_by_key_and_back(tmp_path: Path) -> None:
    def trained(store: KVStore, steps: int) -> list[list[float]]:
        outs = {"a": torch.empty(2, 2), "b": torch.empty(3)}
        for _ in range(steps):
            store.update(
                {"a": torch.full((2, 2), 0.5), "b": torch.tensor([1.0, -2.0, 0.0])}, outs, Share()
            )
        return [out.tolist() for out in outs.values()]

    whole = store_of(a=torch.zeros(2, 2), b=torch.zeros(3))
    whole.set_optimizer("adam", lr=0.1)
    trained(whole, 2)
    state = whole.state()
    assert state.step == 2
    assert state.tensors["a"].keys() == {"exp_avg", "exp_avg_sq"}
    assert state.tensors["a"]["exp_avg"].shape == (2, 2)
    assert state.numbers == {"a": {"step": 2.0}, "b": {"step": 2.0}}
    whole.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    a, b = whole.pull(["a", "b"])
    # Other buckets, and b before a.
    again = create("device")
    again.init("b", b)
    again.init("a", a)
    again.load_optimizer_states(tmp_path / "states")
    assert trained(again, 3) == trained(whole, 3)


def test_states_of_keys_that_took_different_steps() -> None:
    store = store_of(a=torch.zeros(2), b=torch.zeros(2))
    store.set_optimizer("adam", lr=0.1)
    for name in ("a", "a", "b"):
        store.push(name, torch.ones(2))
        store.pull(name)
    state = store.state()
    assert state.numbers == {"a": {"step": 2.0}, "b": {"step": 1.0}}
    other = store_of(a=store.pull("a"), b=store.pull("b"))
    other.set_optimizer("adam", lr=0.1)
    other.load_state(state)
    for each in (store, other):
        out = {"a": torch.empty(2), "b": torch.empty(2)}
        each.update({"a": torch.ones(2), "b": torch.ones(2)}, out, Share())
        assert each.state().numbers == {"a": {"step": 3.0}, "b": {"step": 2.0}}


def refusals() -> list[tuple[Any, str]]:
    store = store_of(a=torch.zeros(3))
    stepping = store_of(a=torch.zeros(3))
    stepping.set_optimizer("sgd", lr=1.0)
    outs = {"a": torch.empty(3)}
    return [
        (lambda: store.init("a", torch.zeros(3)), "the key 'a' was initialised already"),
        (lambda: store.declare({"a": torch.zeros(3)}), "the key 'a' is in the store already"),
        (
            lambda: store.init("i", torch.zeros(3, dtype=torch.int64)),
            "floating-point numbers, not torch.int64",
        ),
        (
            lambda: store.init(3, torch.zeros(3)),
            "the key 3 is a int, but this store's keys are of type str",
        ),
        (lambda: store.push("b", torch.zeros(3)), "there is no key 'b' in the store"),
        (
            lambda: store.push("a", torch.zeros(2)),
            "shape .2. and torch.float32, but the key was initialised with .3.",
        ),
        (
            lambda: store.push("a", torch.zeros(3).double()),
            "torch.float64, but the key was initialised with",
        ),
        (lambda: store.update({}, {}, Share()), "the store has no optimizer"),
        (lambda: store.save_optimizer_states("x"), "the store has no optimizer"),
        (lambda: store.set_gradient_compression({"type": "3bit"}), "there is no codec '3bit'"),
        (
            lambda: store.reduce(
                {"a": torch.sparse_coo_tensor(size=(3,), check_invariants=True)}, Share()
            ),
            "the gradient of 'a' is sparse",
        ),
        (lambda: stepping.update({"b": torch.zeros(3)}, {}, Share()), "there is no key 'b'"),
        (
            lambda: stepping.update({"a": torch.zeros(2)}, outs, Share()),
            "the gradient for the key 'a' has shape",
        ),
        (
            lambda: stepping.update({"a": torch.zeros(3)}, outs, Share(), clip_norm=-1.0),
            "clip_norm=-1.0",
        ),
        (
            lambda: stepping.update({"a": torch.zeros(3)}, outs, Share(), [{"momentun": 1.0}]),
            "momentun",
        ),
        (
            lambda: stepping.update({"a": torch.zeros(3)}, outs, Share(0.0, 1.0)),
            "no worker has a sample",
        ),
    ]


@pytest.mark.parametrize("number", range(len(refusals())))
def test_refused(number: int) -> None:
    call, message = refusals()[number]
    with pytest.raises(UserError, match=message):
        call()


def test_a_second_push_before_a_pull() -> None:
    store = store_of(a=torch.zeros(3))
    store.push("a", torch.ones(3))
    with pytest.raises(UserError, match="'a' was pushed already and not pulled since"):
        store.push("a", torch.ones(3))
    assert store.pull("a").tolist() == [1.0] * 3
    store.push("a", torch.ones(3))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dist_asyn", {}, "there is no key-value store 'dist_asyn'; did you mean 'dist_async'"),
        (
            "dist_async",
            {},
            "needs parameter servers, and this job has none: write `allhands launch -s 1 …`",
        ),
        ("dist_ssp", {"staleness": 3}, "needs parameter servers"),
        (
            "dist_sync",
            {"staleness": 3},
            "staleness=3.: options are for stores with servers, and this job has none",
        ),
        (
            "local",
            {"damping": True},
            "damping=True.: options are for stores with servers, and 'local' never has any",
        ),
        (3, {}, "write the name of a kind of store"),
    ],
)
def test_what_create_refuses(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create(name, **options)


def test_a_number_of_servers_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_NUM_SERVERS", "two")
    with pytest.raises(UserError, match="ALLHANDS_NUM_SERVERS is 'two'"):
        create("dist")


def test_a_table_begins_with_given_rows() -> None:
    store = create("local")
    store.init("t", torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]).to_sparse(1))
    assert store.row_sparse_pull("t", row_ids=torch.tensor([2, 1, 0])).tolist() == [
        [3.0, 4.0],
        [0.0, 0.0],
        [1.0, 2.0],
    ]
    with pytest.raises(
        UserError,
        match=r"init\('all'\): a sparse value is rows of a table; write torch.sparse_coo_tensor",
    ):
        store.init("all", torch.ones(3, 2).to_sparse())
    store.set_optimizer("sgd", learning_rate=1.0)
    with pytest.raises(UserError, match=r"init\('u'\) with given rows comes before set_optimizer"):
        store.init("u", torch.ones(3, 2).to_sparse(1))


def test_the_work_of_pushing_keys_one_by_one_does_not_grow_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[int] = []
    cut = LocalKeys._cut
    monkeypatch.setattr(
        LocalKeys,
        "_cut",
        lambda store, bucket, pieces: moved.append(len(bucket.names)) or cut(store, bucket, pieces),
    )
    store, count = create("local"), 512
    names = [f"{number:03}" for number in range(count)]
    store.init(names, [torch.zeros(2)] * count)
    for turn in (1.0, 2.0):
        store.push(names, [torch.full((2,), turn + n) for n in range(count)])
        assert [float(out[0]) for out in store.pull(names)] == [turn + n for n in range(count)]
    assert sum(moved) <= 4 * count
