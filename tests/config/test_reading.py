"""Files, merging, overrides, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from allhands.config import parse_override, read_run
from allhands.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.yml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def message(files=(), overrides=()) -> str:
    with pytest.raises(UserError) as caught:
        read_run(files, overrides)
    return str(caught.value)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("1.5e+2", 150.0),
        (".5", 0.5),
        ("5", 5),
        ("1_000", 1000),
        ("0x10", 16),
        ("010", "010"),
        ("1:30", "1:30"),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("null", None),
        ("", None),
        ("~", None),
        ("2024-01-01", "2024-01-01"),
        ("[accuracy]", ["accuracy"]),
        ("{a: 1e-2}", {"a": 0.01}),
        ("'5'", "5"),
        ("logs/a=b", "logs/a=b"),
    ],
)
def test_values_are_read_by_the_rules_of_yaml_1_2(text, value):
    path, read = parse_override(f"a.b={text}")
    assert path == ("a", "b")
    assert read == value
    assert type(read) is type(value)


def test_the_same_rules_hold_in_files(write):
    run = read_run(
        [write("optimizer: {name: sgd, lr: 1e-3, weight_decay: 1e-4}\nlogdir: 2024-01-01\n")]
    ).config
    assert run.optimizer.lr == 1e-3
    assert run.optimizer.options == {"weight_decay": 1e-4}
    assert run.logdir == "2024-01-01"


def test_an_empty_file_is_the_digits_job(write):
    run = read_run([write("# nothing\n")]).config
    assert run == read_run().config
    assert (run.data.name, run.model.name, run.strategy.name) == ("digits", "simple_cnn", "ddp")


def test_a_name_alone_is_short_for_a_section(write):
    run = read_run(
        [write("strategy: single\noptimizer: sgd\nscheduler: StepLR\ndata: mnist\n")]
    ).config
    assert (run.strategy.name, run.optimizer.name, run.scheduler.name, run.data.name) == (
        "single",
        "sgd",
        "StepLR",
        "mnist",
    )


def test_the_resolved_file_gives_the_same_run(write):
    first = read_run(
        [
            write(
                "optimizer: {name: sgd, lr: 1e-3, momentum: 0.9}\nscheduler: {name: MultiStepLR, "
                "milestones: [3, 6]}\n"
            )
        ],
        ["early_stopping.patience=3", "logdir=null", "main_metric=accuracy"],
    )
    again = read_run([write(first.to_yaml(), "resolved.yml")])
    assert again.config == first.config
    assert yaml.safe_load(first.to_yaml())["optimizer"]["momentum"] == 0.9


# ---------------------------------------------------------------------- merging


def test_later_files_and_overrides_change_single_keys(write):
    base = write(
        "optimizer: {name: sgd, lr: 0.1, momentum: 0.9}\nmetrics: [accuracy]\nworkers: 2\n",
        "base.yml",
    )
    late = write("optimizer: {lr: 0.2}\nmetrics: []\n", "late.yml")
    run = read_run([base, late], ["optimizer.nesterov=true", "workers=null"]).config
    assert (run.optimizer.name, run.optimizer.lr) == ("sgd", 0.2)
    assert run.optimizer.options == {"momentum": 0.9, "nesterov": True}
    assert run.metrics == []
    assert run.workers is None


def test_an_override_of_a_plain_name_keeps_the_name(write):
    run = read_run([write("optimizer: sgd\n")], ["optimizer.lr=0.5"]).config
    assert (run.optimizer.name, run.optimizer.lr) == ("sgd", 0.5)


def test_a_plain_name_replaces_the_section(write):
    run = read_run(
        [write("optimizer: {name: adamw, betas: [0.8, 0.9]}\n")], ["optimizer=sgd"]
    ).config
    assert (run.optimizer.name, run.optimizer.options) == ("sgd", {})


# ---------------------------------------------------------------------- mistakes


def test_an_unknown_key_is_refused_with_the_nearest(write):
    text = message([write("num_epochs: 3\nprecisoin: bf16\n")])
    assert (
        "run.yml, line 2: precisoin = 'bf16': there is no such key; did you mean 'precision'?"
        in text
    )
    assert "num_epochs" in text  # the list


@pytest.mark.parametrize(
    ("override", "key"),
    [("batch_size=3", "data.batch_size"), ("tp=2", "mesh.tp"), ("lr=0.1", "optimizer.lr")],
)
def test_a_key_of_a_section_is_named_with_it(write, override, key):
    assert message([write("num_epochs: 3\n")], [override]).endswith(
        f"there is no such key; write {key}"
    )


def test_an_unknown_key_of_a_section(write):
    assert (
        "line 1: data.batch_sise = 3: there is no such key; did you mean 'batch_size'?"
        in message([write("data: {name: digits, batch_sise: 3}\n")])
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("num_epochs=1.5", "num_epochs = 1.5: it must be a whole number"),
        ("num_epochs='3'", "num_epochs = '3': it must be a whole number"),
        ("workers=true", "workers = True: it must be a whole number"),
        ("workers=0", "workers = 0: it must be greater than or equal to 1"),
        ("optimizer.lr=abc", "optimizer.lr = 'abc': it must be a number"),
        ("optimizer.lr=.nan", "it must be a finite number"),
        ("optimizer.lr=-1", "it must be greater than 0"),
        (
            "precision=fp23",
            "precision = 'fp23': it must be 'fp32', 'bf16', 'bf16-true', 'fp8' or 'fp16'",
        ),
        ("check=yes", "check = 'yes': it must be true or false"),
        ("early_stopping.min_delta=0.1", "early_stopping.patience: this key must be given"),
        ("scheduler=3", "scheduler = 3: it must be a name, or keys and values"),
        ("metrics=[1]", "metrics.0 = 1: it must be a name, or keys and values"),
        ("optimizer.lr.x=1", "it must be a number"),
    ],
)
def test_a_value_of_the_wrong_type(override, said):
    text = message(overrides=[override])
    assert said in text
    assert f"command line, {override}" in text


def test_all_mistakes_are_named_at_once(write):
    text = message([write("workers: 0\nsede: 1\n")], ["num_epochs=x"])
    assert len(text.splitlines()) == 3


def test_the_last_writer_is_blamed(write):
    assert (
        message([write("workers: 2\n"), write("workers: 0\n", "late.yml")])
        .split(": ")[0]
        .endswith("late.yml, line 1")
    )


@pytest.mark.parametrize("text", ["optimizer", "=3", "--lr=3", "a..b=1", "run.yml"])
def test_what_is_no_override(text):
    assert "write key=value" in message(overrides=[text])


def test_an_override_that_is_no_yaml():
    assert "is not YAML" in message(overrides=["logdir=[a"])


def test_a_key_that_comes_twice(write):
    text = message([write("seed: 1\noptimizer:\n  lr: 1\n  lr: 2\n")])
    assert "run.yml, line 4: the key 'lr' was written in line 3 already" in text


def test_broken_yaml_is_located(write):
    assert "run.yml, line 3" in message([write("seed: 1\nmetrics: [a\nworkers: 2\n")])


def test_no_code_is_executed(write, tmp_path):
    text = message([write(f"logdir: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n")])
    assert "run.yml, line 1" in text
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_absent(write):
    write("seed: 1\n", "digits.yml")
    text = message([write("", "other.txt").with_name("digit.yml")])
    assert "cannot be read" in text
    assert "digits.yml" in text


def test_a_file_that_holds_a_list(write):
    assert "this one holds a list" in message([write("- a\n")])


def test_anchors_and_merge_keys_work(write):
    run = read_run(
        [write("optimizer: &o {name: sgd, lr: 0.1}\nearly_stopping: {patience: 2}\n")]
    ).config
    assert run.optimizer.lr == 0.1
    text = (
        "data: &d {name: digits, batch_size: 8}\nmodel: {name: mlp, sizes: &s [1, 2], again: *s}\n"
    )
    assert read_run([write(text)]).config.model.options == {"sizes": [1, 2], "again": [1, 2]}
