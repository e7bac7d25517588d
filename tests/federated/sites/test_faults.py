"""Sites that are missing, slow, gone, back, started anew or wrong, and a server that is killed; in
memory."""

from __future__ import annotations

import json
import time
import weakref

import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from allhands.errors import UserError
from allhands.federated.rounds import BadUpdateError
from allhands.federated.row_layout import RowLayout
from allhands.federated.sites import site_training
from allhands.federated.sites.arrays import pack
from allhands.federated.sites.site_training import Across
from tests.federated.sites.across import NAMES, grid, net, same, serve, simulate, site
from tests.federated.sites.fake_grid import FakeGrid
from tests.reference import relative_difference

pytestmark = pytest.mark.usefixtures("quick")


def events(logdir, kind=None):
    lines = [
        json.loads(line)
        for line in (logdir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [line for line in lines if kind in (None, line["kind"])]


def trained(given, site, round_):
    """Whether a site was asked to train in a round."""
    asked = [dict(request["allhands"]) for request in given.nodes[100 + NAMES.index(site)].asked]
    return any(one["kind"] == "train" and one["round"] == round_ for one in asked)


def after(given, round_, action):
    """Have something done once round `round_` is under way at the sites: when its first message is
    pulled."""
    done = []

    def look():
        under_way = [
            message
            for message, _ in given._messages.values()
            if message.metadata.message_type == "train"
        ]
        if not done and any(message.metadata.group_id == str(round_) for message in under_way):
            done.append(True)
            action()

    given.before_pull = look


def test_a_site_that_comes_late_takes_part_from_the_next_round(tmp_path):
    given = grid(tmp_path)
    west = given.nodes.pop(103)
    after(given, 1, lambda: given.nodes.update({103: west}))
    # The round is long enough for it to be seen, and its greeting to be answered.
    given.nodes[100].delays["train"] = 0.3
    _, history = serve(given, sites={"min": 3}, logdir=tmp_path / "log")
    assert history["absent"] == [["west"], ["west"], []]
    assert history["failed"] == [[], [], []]
    assert [event["absent"] for event in events(tmp_path / "log", "round")] == [
        ["west"],
        ["west"],
        [],
    ]
    assert [event["site"] for event in events(tmp_path / "log", "greeted")] == [
        "north",
        "east",
        "south",
        "west",
    ]


def test_a_site_that_leaves_in_mid_round_is_left_out_of_it(tmp_path, capsys):
    given = grid(tmp_path / "one")
    after(given, 1, lambda: given.nodes.pop(102))
    model, history = serve(given, sites={"min": 3}, logdir=tmp_path / "log")
    assert history["failed"] == [[], ["south"], []]
    assert history["absent"] == [[], [], ["south"]]
    assert "round 1: site south is left out: the node is not available" in capsys.readouterr().out
    # The others' weights make up the whole: as with a site that the server never hears of in these
    # rounds. The shares of three sites and those of four are not rounded alike.
    again = grid(tmp_path / "two")
    after(again, 1, lambda: again.nodes[102].loses.add("train"))
    other, history = serve(again, sites={"round_timeout": 1.0})
    assert history["failed"] == [[], ["south"], ["south"]]
    assert relative_difference(model.state_dict(), other.state_dict()) < 1e-6
    assert relative_difference(model.state_dict(), simulate()[0].state_dict()) > 1e-3


def test_a_site_that_is_slow_is_named_and_its_late_reply_dropped(tmp_path, capsys):
    given = grid(tmp_path)
    north = given.nodes[100]
    north.delays["train"] = 60.0
    after(given, 1, north.delays.clear)
    _, history = serve(given, sites={"round_timeout": 1.0}, logdir=tmp_path / "log")
    assert history["failed"] == [["north"], [], []]
    assert trained(given, "north", 1)
    assert "site north is left out: nothing came within 1 s" in capsys.readouterr().out
    assert [(event["site"], event["round"]) for event in events(tmp_path / "log", "late")] == [
        ("north", 0)
    ]
    assert [(event["site"], event["round"]) for event in events(tmp_path / "log", "dropped")] == [
        ("north", 0)
    ]
    assert events(tmp_path / "log", "round_end")[-1]["dropped"] == 1


def test_a_site_that_was_cut_off_and_is_back_is_greeted_again(tmp_path):
    given = grid(tmp_path)
    south = given.nodes[102]
    after(given, 0, lambda: given.nodes.pop(102))
    given.nodes[100].delays["train"] = 0.2
    seen = given.get_nodes

    def nodes():
        found = list(seen())
        if events(tmp_path / "log", "failed"):
            given.nodes[102] = south
        return found

    given.get_nodes = nodes
    _, history = serve(given, logdir=tmp_path / "log")
    assert history["failed"] == [["south"], [], []]
    assert history["absent"] == [[], [], []]
    assert [event["site"] for event in events(tmp_path / "log", "greeted")].count("south") == 2


def test_a_site_that_was_started_anew_goes_on_with_what_it_kept(tmp_path):
    options = {"algorithm": "scaffold", "local_layers": ["3.bias"]}
    given = grid(tmp_path, **options)
    for node, name in zip(given.nodes.values(), NAMES, strict=True):
        node.key = name.encode()
    seen = given.get_nodes

    def nodes():
        if len(events(tmp_path / "log", "round_end")) == 1 and 101 in given.nodes:
            del given.nodes[101]
            given.add(201, site(1, tmp_path, **options).handle, key=b"east", since="2")
        return seen()

    given.get_nodes = nodes
    across = Across(given, {name: name.encode() for name in NAMES})
    model, history = serve(across, logdir=tmp_path / "log", **options)
    assert not any(history["failed"])
    assert [event["site"] for event in events(tmp_path / "log", "left")] == ["east"]
    assert same(model, simulate(**options)[0])


def test_a_site_that_was_started_anew_in_mid_round_is_not_waited_for(tmp_path):
    given = grid(tmp_path, rounds=2)
    east = given.nodes[101]

    def restart():
        east.since = "2"
        east.loses.add("train")

    after(given, 1, restart)
    _, history = serve(given, sites={"round_timeout": 600.0}, logdir=tmp_path / "log", rounds=2)
    assert history["failed"] == [[], ["east"]]
    (failed,) = events(tmp_path / "log", "failed")
    assert failed["reason"].endswith("in mid-round")


def test_too_few_sites_end_the_run_by_name(tmp_path, capsys):
    given = grid(tmp_path)
    del given.nodes[101], given.nodes[103]
    with pytest.raises(UserError, match=r"2 of the 3 sites.*missing: east, west.*sites\.min lower"):
        serve(given, sites={"min": 3, "wait": 0.2}, logdir=tmp_path / "log")
    assert "waiting for sites, 2 of 3 are there; missing: east, west" in capsys.readouterr().out
    assert events(tmp_path / "log", "waiting")[-1]["missing"] == ["east", "west"]
    assert "missing: east, west" in events(tmp_path / "log", "end")[-1]["reason"]


def test_too_few_sites_are_waited_for_where_that_is_asked_for(tmp_path):
    given = grid(tmp_path)
    west = given.nodes.pop(103)
    looks = []
    seen = given.get_nodes

    def nodes():
        looks.append(True)
        if len(looks) == 60:
            given.nodes[103] = west
        return seen()

    given.get_nodes = nodes
    model, _ = serve(given, sites={"wait": 0.1, "below": "wait"}, logdir=tmp_path / "log")
    assert len(events(tmp_path / "log", "waiting")) >= 2
    assert same(model, simulate()[0])


def test_waiting_for_sites_is_no_part_of_a_rounds_seconds(tmp_path, monkeypatch):
    real = site_training.Roll.wait_for

    def slow(self):
        time.sleep(0.4)
        real(self)

    monkeypatch.setattr(site_training.Roll, "wait_for", slow)
    given = grid(tmp_path)
    began = time.perf_counter()
    _, history = serve(given)
    assert 0 < sum(history["seconds"]) < time.perf_counter() - began - 3 * 0.4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm": "scaffold", "local_layers": ["3.bias"]},
        {"algorithm": "fedadam"},
        {"compress": {"name": "topk", "keep": 0.2, "feedback": True}},
        {"test_fraction": 0.3},
    ],
    ids=str,
)
def test_a_server_that_was_killed_goes_on_to_the_same_weights(tmp_path, options):
    class Killed(BaseException):
        pass

    def kill():
        raise Killed

    options = {**options, "rounds": 4}
    given = grid(tmp_path, **options)
    # In mid-round: some sites have trained round 2 already.
    given.before_pull = lambda: kill() if trained(given, "east", 2) else None
    with pytest.raises(Killed):
        serve(given, logdir=tmp_path / "log", **options)
    given.before_pull = lambda: None
    model, history = serve(given, logdir=tmp_path / "log", resume="auto", **options)
    expected, simulated = simulate(**options)
    assert same(model, expected)
    assert history["round"] == [0, 1, 2, 3]
    assert history["train"]["loss"] == simulated["train"]["loss"]
    assert [event["round"] for event in events(tmp_path / "log", "begin")] == [0, 2]
    if "test_fraction" in options:
        for name in ("loss", "accuracy"):
            assert history["clients"][name] == pytest.approx(simulated["clients"][name], rel=1e-12)


def test_a_checkpoint_of_other_sites_is_refused(tmp_path):
    given = grid(tmp_path, rounds=1)
    serve(given, logdir=tmp_path / "log", rounds=1)
    with pytest.raises(UserError, match="checkpoint is of the sites north, east, south, west"):
        serve(
            given,
            sites={"names": [*NAMES[:3], "here"]},
            logdir=tmp_path / "log",
            resume="auto",
            rounds=2,
        )


def spoilt(kind, reply):
    if kind == "train":
        reply["update"] = pack({"update": torch.full((97,), float("nan"))})
    return reply


def test_updates_that_are_all_bad_leave_the_model_as_it_was(tmp_path, capsys):
    given = grid(tmp_path)
    for node in given.nodes.values():
        node.spoil = spoilt
    model, history = serve(given, logdir=tmp_path / "log")
    assert same(model, net())
    assert history["skipped"] == [["north", "east", "south", "west"]] * 3
    assert history["unchanged"] == [True] * 3
    printed = capsys.readouterr().out
    assert "round 2: no client of 4 has brought an update; the model stays as it was" in printed
    assert "site west is left out: its update is refused" in printed
    assert len(events(tmp_path / "log", "bad")) == 12


def test_a_bad_update_ends_the_run_where_that_is_asked_for(tmp_path):
    given = grid(tmp_path)
    given.nodes[102].spoil = spoilt
    with pytest.raises(BadUpdateError, match=r"round 0: site south: .*sites\.on_bad='skip'"):
        serve(given, sites={"on_bad": "stop"})


def test_a_site_that_fails_is_named_and_asked_again(tmp_path, capsys):
    given = grid(tmp_path)
    given.nodes[101].fails["train"] = (
        'Traceback (most recent call last):\n  File "x"\nRuntimeError: no space on the disk\n'
    )
    after(given, 1, given.nodes[101].fails.clear)
    _, history = serve(given)
    assert history["failed"] == [["east"], [], []]
    assert (
        "round 0: site east is left out: RuntimeError: no space on the disk"
        in capsys.readouterr().out
    )


def test_replies_that_come_twice_count_once(tmp_path):
    given = grid(tmp_path)
    for node in given.nodes.values():
        node.twice = True
    model, _ = serve(given, logdir=tmp_path / "log")
    assert same(model, simulate()[0])
    assert events(tmp_path / "log", "dropped")


def test_memory_is_that_of_one_reply_however_many_sites_there_are(monkeypatch):
    given, names, alive, most = FakeGrid(), [f"site{number}" for number in range(40)], [], []
    length = RowLayout(net()).length

    def handler(name):
        def handle(request):
            asked = dict(request["allhands"])
            reply = RecordDict({"allhands": ConfigRecord({**asked, "status": "ok", "site": name})})
            reply["figures"] = MetricRecord(
                {"samples": 4.0, "tests": 0.0, "steps": 2.0, "loss": 1.0, "seconds": 0.1}
            )
            if asked["kind"] == "train":
                reply["update"] = pack(
                    {"update": torch.zeros(length).index_fill(0, torch.tensor([0]), 0.25)}
                )
                alive.append(weakref.ref(reply))
            return reply

        return handle

    real = site_training.SiteExecutor._trained

    def counted(self, job, arrays, figures):
        alive.extend(weakref.ref(array) for array in arrays.values())
        return real(self, job, arrays, figures)

    monkeypatch.setattr(site_training.SiteExecutor, "_trained", counted)
    for number, name in enumerate(names):
        given.add(number, handler(name))
    # Whenever the next one is pulled; without help of the collector.
    given.before_pull = lambda: most.append(sum(ref() is not None for ref in alive))
    model, history = serve(given, sites={"names": names}, rounds=2)
    assert not any(history["failed"] + history["skipped"])
    assert len(alive) == 2 * 2 * 40
    assert max(most) == 0
    assert torch.isclose(model[0].weight[0, 0], net()[0].weight[0, 0] + 0.5)
