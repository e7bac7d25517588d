"""The keys of a run file are frozen here, so that changing one is a decision and not an
accident."""

from __future__ import annotations

import inspect
import subprocess
import sys

from pydantic import BaseModel

from allhands.config import RunConfig, schema

KEYS = {
    "RunConfig": "data model criterion optimizer scheduler metrics callbacks loggers runner loop "
    "strategy mesh workers device num_epochs max_steps steps_per_epoch evaluate_every "
    "seed accumulate clip_norm precision step activation_checkpointing logdir resume valid_loader "
    "main_metric minimize_metric "
    "load_best_on_end early_stopping verbose check overfit log_every save_every save_minutes "
    "profile",
    "Data": "name root batch_size num_workers drop_last limit normalize labels block options",
    "Model": "name",
    "Criterion": "name",
    "Optimizer": "name lr",
    "Scheduler": "name period",
    "Metric": "name label",
    "Callback": "name",
    "Tracker": "name",
    "Runner": "name",
    "Loop": "name",
    "Strategy": "name",
    "Mesh": "pp dp tp",
    "EarlyStopping": "patience metric min_delta",
}

# What train() calls otherwise, or what a run file has no key for because the objects are named in
# it.
ELSEWHERE = {
    "self": None,
    "loaders": "data",
    "datasets": "data",
    "distributed": "strategy",
}


def test_keys_are_the_published_ones():
    sections = {
        name: kind
        for name, kind in vars(schema).items()
        if isinstance(kind, type)
        and issubclass(kind, BaseModel)
        and kind.__module__ == schema.__name__
    }
    found = {name: " ".join(sections[name].model_fields) for name in KEYS}
    assert found == KEYS
    assert set(sections) - set(KEYS) == {"Section", "Named"}


def test_every_argument_of_train_has_a_key():
    from allhands import SupervisedRunner

    for name in inspect.signature(SupervisedRunner.train).parameters:
        key = ELSEWHERE.get(name, name)
        assert key is None or key in RunConfig.model_fields, (
            f"train() takes {name}, which a run file cannot set"
        )


def test_defaults_of_train_are_defaults_of_a_run_file():
    from allhands import SupervisedRunner

    parameters = inspect.signature(SupervisedRunner.train).parameters
    # A run says where it writes and shows its progress; the object form does neither unless asked.
    # "best" of None is the loss downwards, as in train().
    differ = {"logdir", "verbose", "num_epochs", "minimize_metric", "callbacks", "loggers"}
    for name, field in RunConfig.model_fields.items():
        if (
            name in parameters
            and name not in differ
            and not isinstance(field.default, BaseModel)
            and field.default is not None
        ):
            assert field.default == parameters[name].default, name


def test_config_needs_no_torch():
    code = "import sys, allhands.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_steps_take_the_place_of_the_epochs_that_nobody_wrote():
    def bounds(**given):
        config = RunConfig.model_validate(given)
        return config.num_epochs, config.max_steps

    assert bounds() == (10, None)
    assert bounds(num_epochs=None) == (10, None)
    assert bounds(max_steps=500) == (None, 500)
    assert bounds(max_steps=500, num_epochs=None) == (None, 500)
    assert bounds(max_steps=500, num_epochs=3) == (3, 500)
    stored = RunConfig.model_validate({"max_steps": 500}).model_dump()
    assert RunConfig.model_validate(stored).num_epochs is None
