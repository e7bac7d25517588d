"""A method that looks like a hook and is none is refused with the name to write; what is none of
the training's is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allhands import Callback, SupervisedRunner, UserError
from allhands.runner.hooks import check_callback, check_runner
from tests.runner.problems import arguments


def method(
    name: str, function: Callable[..., Any] = lambda self, training: None, base: type = Callback
) -> Any:
    return type("Own", (base,), {name: function, "__module__": __name__})()


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("on_batch_end", r"write on_step_end\(self, training\)"),
        ("on_train_batch_end", "write on_step_end"),
        ("on_epoch_ends", "write on_epoch_end"),
        ("on_epoch_begin", "write on_epoch_start"),
        ("on_stage_start", "write on_train_start"),
        ("on_loader_end", "write on_epoch_end"),
        ("on_train_finish", "write on_train_"),
        ("after_epoch", "the hooks are on_train_start"),
        ("onStepEnd", "write on_step_end"),
        ("epoch_end", "write on_epoch_end"),
        ("on_save_checkpoint", r"write state_dict\(self\)"),
        ("load_statedict", r"write load_state_dict\(self, state\)"),
        ("on_batch_start", "no hook at that point; the hooks are on_train_start"),
    ],
)
def test_a_method_that_looks_like_a_hook_is_refused(name, right):
    with pytest.raises(UserError, match=rf"Own\.{name} looks like a hook, and is none.*{right}"):
        check_callback(method(name))


async def waits(self, training):
    pass


@pytest.mark.parametrize(
    ("name", "function", "why"),
    [
        (
            "on_epoch_end",
            lambda self: None,
            r"too many positional arguments\); write def on_epoch_end\(self, training\)",
        ),
        (
            "on_train_start",
            lambda self, trainer, module: None,
            "missing a required argument: 'module'",
        ),
        (
            "on_epoch_end",
            lambda self, epoch, logs=None: None,
            "would get the training as 'epoch'; write def on_epoch_end",
        ),
        (
            "on_step_end",
            lambda self, training: (yield),
            "is a generator, of which a call runs nothing",
        ),
        ("on_step_end", waits, "is a coroutine, of which a call runs nothing"),
        ("load_state_dict", lambda self: None, r"write def load_state_dict\(self, state\)"),
    ],
)
def test_a_hook_that_cannot_be_called_as_one_is_refused(name, function, why):
    with pytest.raises(UserError, match=rf"Own\.{name}.*{why}"):
        check_callback(method(name, function))


def test_what_the_class_itself_calls_is_its_own_affair():
    class Own(Callback):
        def on_step_end(self, training):
            self.on_many(training)

        def on_many(self, training):
            pass

        def _on_batch_end(self):
            pass

        def once(self):
            pass

    check_callback(Own())


def test_a_hook_that_is_set_on_the_object_is_called():
    seen, callback = [], Callback()
    callback.on_step_end = lambda training: seen.append(training.step)
    SupervisedRunner(device="cpu").train(**arguments(callbacks=[callback], num_epochs=1))
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    callback.on_batch_end = lambda training: None
    with pytest.raises(UserError, match="write on_step_end"):
        check_callback(callback)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("_handle_batch", r"write handle_batch\(self, model, batch\)"),
        ("predict_batch", "write handle_batch"),
        ("handle_batches", "did you mean handle_batch"),
        ("targets_of", "did you mean target_of"),
        (
            "on_epoch_end",
            r"hooks belong to an allhands.Callback, as on_epoch_end\(self, training\)",
        ),
        ("on_batch_end", r"as on_step_end\(self, training\)"),
        ("get_loaders", "write train.loaders="),
    ],
)
def test_a_method_of_a_runner_that_is_never_called_is_refused(name, right):
    runner = method(name, lambda self, *given: None, SupervisedRunner)
    with pytest.raises(UserError, match=rf"Own\.{name} is never called.*{right}"):
        check_runner(runner, SupervisedRunner)
    with pytest.raises(UserError, match="is never called"):
        runner.predict(model=torch.nn.Linear(5, 4), dataset=arguments()["loaders"]["valid"].dataset)


def test_a_runner_whose_handle_batch_takes_something_else_is_refused():
    with pytest.raises(
        UserError, match=r"Own\.handle_batch\(.*write def handle_batch\(self, model, batch\)"
    ):
        check_runner(
            method("handle_batch", lambda self, batch: None, SupervisedRunner), SupervisedRunner
        )


def test_a_runner_may_call_methods_of_its_own():
    class Own(SupervisedRunner):
        def handle_batch(self, model, batch):
            return self._handle_batch(model, batch), batch[-1]

        def _handle_batch(self, model, batch):
            return self.forward(model, batch)

        def forward(self, model, batch):
            return model(batch[0])

    check_runner(Own(), SupervisedRunner)
