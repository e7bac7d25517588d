"""The pages of COALA's and MXNet's calls: made from any folder, true of every call that they
list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import allhands
import allhands.federated as coala
from allhands.errors import UserError
from allhands.federated.coala import api
from tests.peers import coala_calls, coala_scripts, mxnet_calls, mxnet_scripts, trials
from tests.peers.pages import COALA, MXNET
from tests.peers.peer_page import Section, page, rows_of
from tests.worlds import in_world

PAGES = {COALA: coala_calls.SECTIONS, MXNET: mxnet_calls.SECTIONS}
BASES = (coala.BaseServer, coala.BaseClient)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    api.unregister()
    api._joined = None
    allhands.finalize()


@pytest.mark.parametrize("file", PAGES, ids=lambda path: path.stem)
def test_each_row_is_what_the_call_is_here_and_none_is_absent(file: Path) -> None:
    rows = [row for row in rows_of(file.read_text()) if row[0] in PAGES[file]]
    assert len(rows) > 30
    for title, name, state, note in rows:
        section = PAGES[file][title]
        assert section.state_of(name) == (state, note), name
        assert state != "absent", name
        assert bool(note) == (state != "works"), name
    listed = {(title, name) for title, name, _, _ in rows}
    for title, section in PAGES[file].items():
        assert {(title, name) for name in section.notes} <= listed


@pytest.mark.parametrize("file", PAGES, ids=lambda path: path.stem)
def test_no_example_script_ends_without_a_word(file: Path) -> None:
    rows = [row for row in rows_of(file.read_text()) if row[0] == "Example scripts"]
    assert rows
    assert {state for _, _, state, _ in rows} <= {"works", "differs", "refused"}


def outcomes(folder: Path) -> dict[str, Any]:
    allhands.init(device="cpu")
    found = {}
    for name, call in trials.mxnet(folder).items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.serial
def test_each_call_of_mxnet_that_is_here_gives_two_workers_the_same(tmp_path: Path) -> None:
    ranks = in_world(2, outcomes, tmp_path)
    wanted = {name for section in mxnet_calls.SECTIONS.values() for name in section.notes}
    assert set(ranks[0]) == wanted
    for name in wanted:
        values = [found[name] for found in ranks]
        assert not any(isinstance(value, str) and "Error: " in value for value in values), values
        assert same(*values), f"{name}: {values}"


def test_each_method_of_coala_s_server_and_client_is_called(fresh: None) -> None:
    called: set[str] = set()
    by_class = {}
    for kind in BASES:
        section = coala_calls.SECTIONS[
            "coala.server" if kind is coala.BaseServer else "coala.client"
        ]
        by_class[kind] = [name.partition(".")[2] for name in section.notes if "." in name]
    asked = {"aggregate", "set_model", "num_of_clients", "print_", "is_primary_server"}
    wrapped = [name for name in by_class[coala.BaseServer] if name not in asked]
    base: Any = trials.recorded(coala.BaseServer, wrapped, called)

    class Asks(base):
        def aggregate(self, models, weights):
            called.add("BaseServer.aggregate")
            return models[0]

        def post_train(self):
            super().post_train()
            self.set_model(self.model.state_dict())
            self.print_(f"{self.num_of_clients()} clients")
            called.update(f"BaseServer.{name}" for name in asked if name != "aggregate")
            assert (self.num_of_clients(), self.is_primary_server()) == (4, True)

    client = trials.recorded(coala.BaseClient, by_class[coala.BaseClient], called)
    for mode in ("test_in_client", "test_in_server"):
        coala.register_server(Asks)
        coala.register_client(client)
        result = trials.federation(mode)
        assert sorted(result.history["test"]) == ["accuracy", "loss", "round"]
    expected = {f"{kind.__name__}.{name}" for kind, names in by_class.items() for name in names}
    assert called == expected


def test_coala_s_other_calls(fresh: None, tmp_path: Path) -> None:
    data = coala.FederatedTensorDataset(trials.samples(40), num_of_clients=4, min_size=1)
    data.simulation(5)
    assert (data.total_size(), data.size(), data.users) == (40, 40, [])
    assert [len(x) for x, _ in data.loader(16)] == [16, 16, 8]
    assert [len(x) for x, _ in data.loader(16, drop_last=True)] == [16, 16]
    assert len(data.loader(16, drop_last=True)) == 2
    (tmp_path / "conf.yaml").write_text("server: {rounds: 1, clients_per_round: 2}\ngpu: 0\n")
    coala.register_model(trials.Net)
    coala.register_dataset(data, coala.FederatedTorchDataset(data.dataset))
    coala.init(coala.load_config("conf.yaml", {"client": {"local_epoch": 1}}), init_all=False)
    coala.init_dataset()
    assert isinstance(coala.init_model(), torch.nn.Module)
    assert len(coala.run().history["round"]) == 1
    assert data.users == [], "a copy of it is divided"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: coala.FederatedTensorDataset(trials.samples(4), data_wrapping=list),
            "transform=",
        ),
        (
            lambda: coala.FederatedTorchDataset({}, is_loaded=True),
            "not their loaders",
        ),
        (
            lambda: coala.FederatedTensorDataset(trials.samples(4)).loader(2, transform=abs),
            "FederatedTensorDataset\\(…, transform=…\\)",
        ),
        (
            lambda: coala.FederatedTensorDataset(
                {"a": trials.samples(4)}, simulated=True
            ).simulation(3),
            "divided already",
        ),
    ],
)
def test_what_a_data_set_is_not_given_is_refused_with_what_to_write(call, message) -> None:
    with pytest.raises(UserError, match=message):
        call()


def test_a_method_that_is_not_here_says_so_where_it_is_called(fresh: None) -> None:
    class Tracks(coala.BaseServer):
        def post_train(self):
            self.track("loss", 1.0)

    coala.register_server(Tracks)
    with pytest.raises(UserError, match=r"Tracks.track is not here.*history that run\(\) returns"):
        trials.federation(
            "test_in_server",
            {"server": {"rounds": 1, "clients_per_round": 2}, "client": {"local_epoch": 1}},
        )
    with pytest.raises(AttributeError, match="no attribute 'tracks'"):
        coala.BaseClient.__new__(coala.BaseClient).tracks  # noqa: B018


@pytest.mark.parametrize("kind", ["horovod", "byteps", "nccl"])
def test_kinds_of_stores_that_are_not_here_name_one_that_is(kind: str) -> None:
    with pytest.raises(UserError, match=r"write create\('(dist|device)'\)"):
        allhands.kvstore.create(kind)


def test_a_page_of_a_section_and_its_scripts() -> None:
    section = Section("kv", "allhands.kvstore", {"create": "", "split_data": "differs: so"})
    given = {
        "create": ("name",),
        "split_data": ("data", "unknown"),
        "BytePS": (),
        "odd": (),
    }
    text = page("# Head\n", {"kv": (section, given)}, {"a.py": ("works", "")})
    assert "Of 4 calls 1 work, 1 are refused, 2 are absent." in text
    assert rows_of(text) == [
        ("kv", "create", "works", ""),
        ("kv", "split_data", "absent", "does not take unknown"),
        ("kv", "BytePS", "refused", "create('dist')"),
        ("kv", "odd", "absent", ""),
        ("Example scripts", "a.py", "works", ""),
    ]


def test_calls_of_folders(tmp_path: Path) -> None:
    """Names, methods and parameters come from the source, which is not imported."""
    files = {
        "python/mxnet/kvstore/base.py": "raise SystemExit\ndef create(name='local'): ...\n",
        "python/mxnet/kvstore/kvstore.py": "class KVStore(Base):\n"
        "    def __init__(self, handle): ...\n    def push(self, key, value, *, priority=0): ...\n"
        "    def _hidden(self): ...\n",
        "python/mxnet/gluon/trainer.py": "class Trainer:\n    def step(self, batch_size): ...\n",
        "python/mxnet/gluon/utils.py": "".join(
            f"def {name}(a): ...\n" for name in mxnet_calls._UTILS
        ),
        "example/one.py": "store = mx.kv.create('nccl')\n",
        "example/two.py": "gluon.Trainer(params, kvstore='device').step(1)\n",
        "example/three.py": "print(mx.nd.zeros(1))\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = mxnet_calls.found(tmp_path)
    assert found["mxnet.kv"]["KVStore.push"] == ("key", "value", "priority")
    assert "KVStore._hidden" not in found["mxnet.kv"]
    assert found["mxnet.gluon.Trainer"] == {"Trainer": (), "Trainer.step": ("batch_size",)}
    assert mxnet_scripts.outcomes(tmp_path) == {
        "example/one.py": ("refused", "create('device')"),
        "example/two.py": (
            "differs",
            "with PyTorch's arrays; `Trainer`, `step`, `create('device')` are here",
        ),
    }


@pytest.mark.slow
@pytest.mark.serial
def test_scripts_are_run_with_their_import_lines_changed(tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    examples.mkdir()
    (examples / "a.py").write_text(
        "import coala\nfrom coala.server import BaseServer\n"
        "class Own(BaseServer): pass\n"
        "coala.register_server(Own)\n"
        "coala.init({'data': {'num_of_clients': 10}, 'model': 'mlp'})\ncoala.run()\n"
    )
    (examples / "b.py").write_text("import coala\ncoala.start_remote_client()\n")
    (examples / "c.py").write_text("import coala\ncoala.nothing\n")
    found = coala_scripts.outcomes(tmp_path)
    assert found["a.py"] == ("works", "")
    assert found["b.py"][0] == "refused"
    assert "allhands federated site" in found["b.py"][1]
    assert found["c.py"][0] == "absent"
