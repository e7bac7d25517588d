"""What a site answers to each request of a server."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from allhands.errors import UserError
from allhands.federated.sites.arrays import unpack
from allhands.federated.sites.describe import describe
from allhands.federated.sites.site_keys import prove
from allhands.federated.sites.site_worker import SiteWorker
from allhands.runner import SupervisedRunner
from allhands.world import finalize, init
from tests.federated.sites.worker_serving import (
    NAMES,
    Serving,
    assert_same,
    define,
    row_of,
    rows_of,
    simulate,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """One thread here and in the simulation's worker: statistics of BatchNorm on a processor have
    other last bits with two, and how many an earlier test has left here is not known."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    init(device="cpu")
    yield
    finalize()
    torch.set_num_threads(threads)


CASES = [
    {"algorithm": "fedavg"},
    {"algorithm": {"name": "fedprox", "mu": 0.1}},
    {"algorithm": "scaffold"},
    {"algorithm": "fedavg", "norm": True},
    {"algorithm": "fedbn", "norm": True},
    {"algorithm": "fedavg", "compress": {"name": "topk", "keep": 0.1, "feedback": True}},
    {"algorithm": "fedavg", "compress": "int8"},
    {"algorithm": "fedbn", "norm": True, "compress": "1bit"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case).replace('"', ""))
def test_rounds_across_sites_are_the_simulation_s_to_the_bit(case, tmp_path):
    serving = Serving(tmp_path, **case)
    start = copy.deepcopy(serving.model())
    for _ in range(3):
        serving.round()
    assert_same(serving.model(), simulate(tmp_path, **case))
    assert any(
        not torch.equal(a, b)
        for a, b in zip(start.parameters(), serving.model().parameters(), strict=True)
    )


def test_what_is_narrowed_is_sent_in_fewer_bytes(tmp_path):
    def sent(**options):
        serving = Serving(tmp_path / str(len(options)), **options)
        update = serving.sites[0].handle(serving.request(0))["update"]
        # Without NumPy's headers.
        return set(update), sum(len(array.data) - 128 for array in update.values())

    names, whole = sent()
    assert names == {"update"}
    names, part = sent(compress={"name": "topk", "keep": 0.05})
    assert names == {"update.places", "update.values"}
    assert part < whole / 5
    names, part = sent(compress="1bit")
    assert names == {"update.codes", "update.palette", "update.counts", "update.bounds"}
    assert part < whole / 2


@pytest.mark.parametrize(
    "case", [{"algorithm": "scaffold"}, {"algorithm": "fedbn", "norm": True, "compress": "1bit"}]
)
def test_what_a_site_keeps_survives_its_restart(case, tmp_path):
    serving = Serving(tmp_path, **case)
    for _ in range(3):
        serving.round()
        serving.sites = [
            SiteWorker(define(rows_of(client), **case), name, tmp_path / name)
            for client, name in enumerate(NAMES)
        ]
    assert_same(serving.model(), simulate(tmp_path, **case))


def test_an_update_that_the_server_did_not_take_leaves_no_trace_at_the_site(tmp_path):
    plain, dropping = (
        Serving(tmp_path / "a", algorithm="scaffold"),
        Serving(tmp_path / "b", algorithm="scaffold"),
    )
    for serving in (plain, dropping):
        serving.round()
    for client in (0, 2):  # trained, and the answers came too late
        assert dropping.sites[client].handle(dropping.request(client))["allhands"]["status"] == "ok"
    for serving in (plain, dropping):
        serving.server.round = 2
        serving.round()
        serving.round()
    assert torch.equal(row_of(plain), row_of(dropping))


def test_a_server_that_goes_back_one_round_finds_what_the_site_had(tmp_path):
    serving = Serving(tmp_path, algorithm="scaffold")
    serving.round()
    serving.round()
    kept = (
        serving.server.weights.clone(),
        copy.deepcopy(serving.algorithm.state_dict()),
        dict(serving.since),
    )
    serving.round()
    first = row_of(serving)
    serving.server.weights.copy_(kept[0])
    serving.algorithm.load_state_dict(kept[1])
    serving.since, serving.server.round = kept[2], 2
    serving.round()
    assert torch.equal(row_of(serving), first)


def test_a_state_that_is_gone_is_refused_by_name(tmp_path):
    serving = Serving(tmp_path, algorithm="scaffold")
    serving.round()
    for path in (tmp_path / "north" / "trial").iterdir():
        path.unlink()
    reply = serving.sites[0].handle(serving.request(0))["allhands"]
    assert reply["status"] == "refused"
    assert "keeps no state after round 0 of the run 'trial'" in reply["reason"]


def greet(site, description, **more):
    return site.handle(
        RecordDict(
            {
                "allhands": ConfigRecord(
                    {"kind": "hello", "description": json.dumps(description), **more}
                )
            }
        )
    )


def description_of(serving, **changed):
    given = SimpleNamespace(**{**vars(serving.sites[0].placed.rounds.work), **changed})
    return describe(given, serving.server, serving.definition.strategy)


def test_a_site_greets_with_how_many_samples_it_has_and_that_it_knows_its_token(tmp_path):
    serving = Serving(tmp_path, token="secret", test_fraction=0.2)
    reply = greet(serving.sites[1], description_of(serving), challenge="a challenge")
    proof = prove("secret", "a challenge", "east")
    assert dict(reply["allhands"]) == {"status": "ok", "proof": proof, "site": "east"}
    assert dict(reply["figures"]) == {"samples": 21.0, "tests": 5.0}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model": nn.Linear(6, 3)}, "the model has no '0.weight' here"),
        (
            {
                "model": nn.Sequential(
                    nn.Linear(6, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 4), nn.Linear(4, 3)
                )
            },
            "the model has a '4.weight' here",
        ),
        (
            {"model": nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 4))},
            r"the model's '3.weight' is \[3, 9\] at the server and \[4, 9\] here",
        ),
        ({"algorithm": "fedprox"}, "algorithm is 'fedprox' here and 'fedavg' at the server"),
        ({"local_epochs": 1}, "local_epochs is 1 here and 2 at the server"),
        (
            {"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9)},
            "optimizer.lr is 0.2 here and 0.1",
        ),
        (
            {"optimizer": lambda m: torch.optim.Adam(m.parameters())},
            "optimizer is 'Adam' here and 'SGD' at the server",
        ),
        ({"compress": "int8"}, "compress is 'int8' here and None at the server"),
        ({"local_layers": ["3"]}, "local_layers is"),
    ],
)
def test_a_site_with_another_training_says_in_what_it_differs(options, reason, tmp_path):
    serving = Serving(tmp_path)
    site = SiteWorker(define(rows_of(0), **options), "north", tmp_path / "other")
    reply = greet(site, description_of(serving))["allhands"]
    assert reply["status"] == "refused"
    assert re.search(reason, reply["reason"]), reply["reason"]


def test_labels_and_versions_are_compared(tmp_path):
    serving = Serving(tmp_path)
    definition = define(rows_of(0))
    definition.labels = ["cat", "dog", "owl"]
    site = SiteWorker(definition, "north", tmp_path / "other")
    theirs = {**description_of(serving), "labels": ["dog", "cat", "owl"]}
    assert (
        greet(site, theirs)["allhands"]["reason"]
        == "the classes are cat, dog, owl here and dog, cat, owl at the server"
    )
    assert greet(site, {**theirs, "labels": None})["allhands"]["status"] == "ok"
    unnamed = greet(
        SiteWorker(define(rows_of(0)), "north", tmp_path / "more"),
        {**theirs, "labels": ["dog", "cat"]},
    )
    assert (
        unnamed["allhands"]["reason"]
        == "a sample here is of class 2, and the server names 2 classes, from 0"
    )
    assert (
        "install the server's version"
        in greet(site, {**theirs, "allhands": "9.9"})["allhands"]["reason"]
    )
    for wrong in ([], {}, {"allhands": theirs["allhands"], "weights": 3}, None):
        assert greet(site, wrong)["allhands"]["reason"] == "the server's description cannot be read"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kind": "delete"}, "knows no such message"),
        ({"kind": None}, "has no 'kind'"),
        ({"round": "1"}, "'round' is no whole number"),
        ({"client": 4}, "there is no client 4 of 4"),
        ({"client": -1}, "there is no client -1"),
        ({"seed": 7}, "seed is 42 here and 7 at the server"),
        ({"run": "../../etc", "algorithm": 0}, "the run's name must be"),
        ({"lr": [0.1, 0.1]}, "has 2 groups, and this site's 1"),
        ({"options": '[{"nesterov_": 1}]'}, "has no option 'nesterov_' here"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_the_reason(changed, reason, tmp_path):
    serving = Serving(tmp_path, algorithm="scaffold")
    reply = serving.sites[0].handle(serving.request(0, **changed))
    assert reply["allhands"]["status"] == "refused"
    assert reason in reply["allhands"]["reason"]
    assert "update" not in reply
    serving.round()  # and the site goes on


def test_weights_of_another_shape_or_with_nan_are_refused(tmp_path):
    serving = Serving(tmp_path)
    request = serving.request(0)
    request["model"] = ArrayRecord({"row": Array(torch.zeros(7).numpy())})
    assert "'row' is [7], and must be" in serving.sites[0].handle(request)["allhands"]["reason"]
    del request["model"]
    assert (
        serving.sites[0].handle(request)["allhands"]["reason"]
        == "the message has no arrays 'model'"
    )
    assert (
        serving.sites[0].handle(RecordDict())["allhands"]["reason"]
        == "the message is none of allhands'"
    )
    serving.server.weights[5] = float("nan")
    assert (
        serving.sites[0].handle(serving.request(0))["allhands"]["reason"]
        == "the server's 'row' holds NaN or Inf"
    )


def test_a_training_that_fails_or_diverges_is_told_and_the_next_one_works(tmp_path, capsys):
    class Broken(SupervisedRunner):
        fails = True

        def handle_batch(self, model, batch):
            if self.fails:
                raise ZeroDivisionError("the sensor is off")
            return super().handle_batch(model, batch)

    definition = define(rows_of(0))
    definition.runner = Broken(device="cpu")
    serving = Serving(tmp_path)
    site = SiteWorker(definition, "north", tmp_path / "other")
    assert (
        site.handle(serving.request(0))["allhands"]["reason"]
        == "ZeroDivisionError: the sensor is off"
    )
    definition.runner.fails = False
    assert site.handle(serving.request(0))["allhands"]["status"] == "ok"
    reply = site.handle(serving.request(0, lr=1e30))
    assert reply["allhands"]["reason"].startswith("the model came out with NaN or Inf")
    assert site.handle(serving.request(0))["allhands"]["status"] == "ok"
    assert "the sensor is off" in capsys.readouterr().err


def test_rates_and_options_of_a_schedule_are_the_server_s(tmp_path):
    serving = Serving(tmp_path)
    site = serving.sites[0]
    plain = unpack(site.handle(serving.request(0))["update"], serving.expected())["update"]
    slower = unpack(site.handle(serving.request(0, lr=[0.05]))["update"], serving.expected())[
        "update"
    ]
    changed = serving.request(0, options=json.dumps([{"momentum": 0.0}]))
    still = unpack(site.handle(changed)["update"], serving.expected())["update"]
    assert site.local.optimizer.options[0]["momentum"] == 0.0
    assert not torch.equal(plain, slower)
    assert not torch.equal(plain, still)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"algorithm": "local_only"}, "allhands run"),
        ({"algorithm": "centralised"}, "stay at their sites"),
        ({"algorithm": "fedbuff"}, "sites.round_timeout"),
        ({"systems": {"speed": 50.0}}, "leave it out"),
        ({"executor": "stacked"}, "executor='auto'"),
        ({"devices_per_client": 2}, "leave it out"),
    ],
)
def test_what_only_a_simulation_can_do_is_refused_by_name(options, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        SiteWorker(define(rows_of(0), **options), "north", tmp_path)
