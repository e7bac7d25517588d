"""The processes of a site: the warm one, and the watching over all of them. Flower's own are stood
for by small programs."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.patience import patience

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Metadata, RecordDict
from flwr.app.message import make_message

from allhands.cli.run_training import definition
from allhands.config import read_run
from allhands.errors import UserError
from allhands.federated.local_training import LocalOptimizer
from allhands.federated.row_layout import RowLayout
from allhands.federated.sites import client_app, site, warm_process
from allhands.federated.sites.arrays import pack
from allhands.federated.sites.local_socket import SocketError, ask
from allhands.federated.sites.site import Site, SiteOptions, address_of, check, commands

DATA = """
import time
from pathlib import Path
import torch
from torch.utils.data import Dataset


class Rows(Dataset):
    def __init__(self, root):
        self.slow = Path(root, "slow")
        self.x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
        self.y = torch.arange(12) % 2

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.slow.exists():
            self.slow.with_name("began").touch()
            time.sleep(60)
        return self.x[index], self.y[index]


def load(root):
    return {"train": Rows(root)}
"""


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "rows.py").write_text(DATA)
    text = {
        "data": {"name": f"{tmp_path}/rows.py:load", "root": str(tmp_path), "batch_size": 4},
        "device": "cpu",
        "model": {"name": "mlp", "in_features": 4, "out_features": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "strategy": {"name": "federated", "rounds": 2},
        "logdir": None,
    }
    path = tmp_path / "run.yml"
    path.write_text(json.dumps(text))
    return path


def options(tmp_path, **changed):
    given = {
        "server": "127.0.0.1:1",
        "data": tmp_path,
        "name": "north",
        "key": None,
        "authority": None,
        "token_file": None,
    }
    return SiteOptions(**{**given, "state": tmp_path / "state", **changed})


def train_request(run_file, round_=0):
    made = definition(read_run([run_file]))
    layout = RowLayout(made.model, LocalOptimizer.like(made.optimizer, made.model).groups)
    config = {
        "kind": "train",
        "run": "trial",
        "round": round_,
        "client": 0,
        "clients": 1,
        "seed": 42,
        "lr": 0.1,
    }
    return RecordDict(
        {"allhands": ConfigRecord(config), "model": pack({"row": layout.read(made.model)})}
    )


def asked_of(content):
    """A message as it comes from the SuperNode."""
    metadata = Metadata(
        run_id=1,
        message_id="1",
        src_node_id=1,
        dst_node_id=7,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=100.0,
        message_type="train",
    )
    return make_message(content=content, metadata=metadata)


def waited(what, seconds=60.0):
    deadline = time.monotonic() + patience(seconds)
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def is_alive(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def state(tmp_path):
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.mark.serial
@pytest.mark.slow
def test_a_warm_process_that_is_killed_in_a_request_is_told_and_started_again(
    run_file, state, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(site, "_FIRST_PAUSE", 0.1)
    with Site(options(tmp_path), run_file.read_text(), client_app.DEFINE) as held:
        held._spawn("warm")
        waited(held._is_ready)
        address, request = state / "warm.sock", train_request(run_file)
        (tmp_path / "slow").touch()
        told = []

        def asking():
            try:
                ask(address, request)
            except SocketError as error:
                told.append(str(error))

        thread = threading.Thread(target=asking)
        thread.start()
        waited((tmp_path / "began").exists)
        first = held._children["warm"].pid
        os.kill(first, signal.SIGKILL)
        thread.join(20)
        assert told
        assert told[0].startswith("the site's warm process ended in the middle of the request")
        (tmp_path / "slow").unlink()
        held._children["warm"].wait(20)
        held.watch()
        second = held._children["warm"].pid
        assert second != first
        reply = ask(address, request)  # waits until it listens again
        assert reply["allhands"]["status"] == "ok"
        assert reply["figures"]["samples"] == 12
    assert not is_alive(second)
    assert "the warm process was ended by SIGKILL; it is started again in" in capfd.readouterr().out


@pytest.mark.serial
@pytest.mark.slow
def test_an_app_that_nobody_supervises_starts_its_warm_process_once_and_lets_it_end(
    run_file, state, monkeypatch, tmp_path
):
    monkeypatch.setattr(client_app, "_IDLE", 2.0)
    monkeypatch.setenv(client_app.RUN_FILE, str(run_file))
    context = SimpleNamespace(
        node_id=7, node_config={"data": str(tmp_path), "name": "north", "state": str(state)}
    )
    for _ in range(2):
        message = asked_of(train_request(run_file))
        reply = client_app.app(message, context)
        assert reply.content["allhands"]["site"] == "north"
        assert reply.content["allhands"]["status"] == "ok"
    waited(lambda: not client_app._runs(state), 20)
    assert (state / "warm.out").read_text().count("is ready") == 1


def test_data_that_cannot_be_read_are_named(run_file, state, tmp_path):
    (tmp_path / "other.yml").write_text(
        run_file.read_text().replace("rows.py:load", "rows.py:gone")
    )
    settings = client_app.settings_of(
        state, "north", [str(tmp_path / "other.yml")], tmp_path, None, None
    )
    with pytest.raises(UserError, match="has no function 'gone'"):
        warm_process.run(settings)
    assert not list(state.iterdir())


def program(text):
    return [sys.executable, "-S", "-c", text]


_SLEEPS = "import time; time.sleep(100)"


@pytest.fixture
def watched(state, tmp_path, monkeypatch):
    """A site whose processes are programs of ours; it is connected."""
    monkeypatch.setattr(site, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(site, "_GRACE", 1.0)
    monkeypatch.setattr(site, "probe", lambda *_, **__: None)
    with Site(options(tmp_path), "{}", client_app.DEFINE) as held:
        held.commands = {
            "warm": program(f"open({str(state / 'warm.sock')!r}, 'w'); {_SLEEPS}"),
            "supernode": program(_SLEEPS),
            "superexec": program(_SLEEPS),
        }
        yield held


@pytest.mark.serial
def test_a_warm_process_that_cannot_start_ends_the_site(watched):
    watched.commands["warm"] = program("raise SystemExit(2)")
    with pytest.raises(
        UserError, match=r"the site's warm process ended with code 2; what it printed says why"
    ):
        watched.start()
    assert list(watched._children) == ["warm"]


@pytest.mark.serial
def test_flower_s_processes_are_started_again_together(watched, capsys):
    watched.start()
    before = dict(watched._children)
    watched.watch()
    assert watched._children == before
    os.kill(before["supernode"].pid, signal.SIGKILL)
    before["supernode"].wait()
    watched.watch()
    assert {name for name, child in watched._children.items() if child is before[name]} == {"warm"}
    assert before["superexec"].returncode is not None
    assert "the supernode was ended by SIGKILL" in capsys.readouterr().out


@pytest.mark.serial
def test_a_server_that_does_not_let_the_site_in_is_tried_again_after_longer_and_longer(
    watched, capsys
):
    watched.commands["supernode"] = program("print('Exit Code: 305'); raise SystemExit(1)")
    watched.start()
    for _ in range(3):
        watched._children["supernode"].wait()
        watched.watch()
    said = capsys.readouterr().out
    assert (
        said.count(
            "the server does not let north in: it must be in the server's list of sites (--sites)"
        )
        == 3
    )
    assert watched._pauses["supernode"] == pytest.approx(0.2)


@pytest.mark.serial
def test_nothing_that_a_site_started_outlives_it(watched):
    grandchild = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', "
        "'import time; time.sleep(100)']); "
    )
    watched.commands["superexec"] = program(grandchild + "print(p.pid, flush=True); p.wait()")
    watched.start()
    out = watched.options.state / "superexec.out"
    waited(lambda: out.read_text().strip(), 10)
    children = [child.pid for child in watched._children.values()] + [int(out.read_text())]
    watched.__exit__()
    waited(lambda: not any(map(is_alive, children)), 5)


@pytest.mark.serial
def test_a_server_that_is_not_there_is_waited_for_and_said(watched, monkeypatch, capsys):
    answers = iter(["nobody answers at 127.0.0.1:1", "nobody answers at 127.0.0.1:1", None])
    monkeypatch.setattr(site, "probe", lambda *_, **__: next(answers))
    monkeypatch.setattr(site, "_RETRY", 0.05)
    watched.start()
    assert (
        capsys.readouterr().out.count("waiting for the server: nobody answers at 127.0.0.1:1") == 1
    )


@pytest.mark.serial
def test_two_sites_do_not_share_a_folder(state, tmp_path, run_file):
    with site.alone(state, "site"), pytest.raises(UserError, match="another site uses the folder"):
        site.run(options(tmp_path), run_file.read_text())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"server": "example.org"}, "--server example.org; write HOST:PORT"),
        ({"server": "example.org:0"}, "write HOST:PORT"),
        ({"name": "nor/th"}, "name"),
        ({"key": "gone"}, "gone"),
        ({"data": "gone"}, "is not a folder"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(changed, message, tmp_path):
    given = {
        key: tmp_path / value if key in ("key", "data") else value for key, value in changed.items()
    }
    with pytest.raises(UserError, match=message):
        check(options(tmp_path, **given))
    assert not (tmp_path / "state").exists()


def test_addresses():
    assert address_of("example.org:8000") == ("example.org", 8000)
    assert address_of("[::1]:8000") == ("::1", 8000)


def test_keys_and_certificates_are_handed_to_flower_and_the_socket_is_named(tmp_path):
    made = commands(
        options(tmp_path, key=tmp_path / "north", authority=tmp_path / "ca.crt", port=8203)
    )
    text = " ".join(made["supernode"])
    assert f"--root-certificates {tmp_path / 'ca.crt'}" in text
    assert f"--auth-supernode-private-key {tmp_path / 'north'}" in text
    assert "--insecure" not in text
    assert "--isolation process" in text
    assert f'allhands-socket="{tmp_path / "state" / "warm.sock"}"' in text
    assert "127.0.0.1:8203" in made["superexec"]
    assert "--insecure" in commands(options(tmp_path))["supernode"]


def test_a_node_without_data_is_told_what_to_write(monkeypatch, run_file):
    with pytest.raises(UserError, match="data is not set: start this site by"):
        client_app.socket_of({}, 7)
    monkeypatch.delenv(client_app.RUN_FILE, raising=False)
    with pytest.raises(UserError, match=f"{client_app.RUN_FILE} is not set"):
        client_app.socket_of({"data": "/x"}, 7)
