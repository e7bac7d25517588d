"""The distributed optimizer of Keras 3, in fit and by hand, against one process that sees all
samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import allhands.horovod.tensorflow as hvd
import allhands.horovod.tensorflow.keras as hvd_keras
from tests.horovod.tensorflow.workers import Workers

pytestmark = pytest.mark.serial

BATCH = 4  # of each of two workers
OPTIMIZERS = {
    "clipped": lambda: tf.keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, global_clipnorm=0.5
    ),
    "decayed": lambda: tf.keras.optimizers.AdamW(
        tf.keras.optimizers.schedules.CosineDecay(0.05, 10), weight_decay=0.1
    ),
    "scaled": lambda: tf.keras.optimizers.LossScaleOptimizer(
        tf.keras.optimizers.SGD(0.1), initial_scale=4.0
    ),
}


def model_of(optimizer: Any, **options: Any) -> Any:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(
                8, activation="tanh", kernel_initializer=tf.keras.initializers.GlorotUniform(1)
            ),
            layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(2)),
        ]
    )
    model.compile(optimizer, "mse", **options)
    return model


def samples() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.standard_normal((10 * BATCH, 6)).astype(np.float32), random.standard_normal(
        (10 * BATCH, 1)
    ).astype(np.float32)


def of_this_rank(rows: Any) -> Any:
    """The half of each batch of two workers that is this one's."""
    return rows.reshape(-1, 2, BATCH, rows.shape[1])[:, hvd.rank()].reshape(-1, rows.shape[1])


def fitted(which: str, distributed: bool) -> list[Any]:
    inputs, targets = samples()
    optimizer = OPTIMIZERS[which]()
    if distributed:
        optimizer, inputs, targets = (
            hvd.DistributedOptimizer(optimizer),
            of_this_rank(inputs),
            of_this_rank(targets),
        )
    model = model_of(optimizer)
    model.fit(
        inputs,
        targets,
        batch_size=BATCH if distributed else 2 * BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    return [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_fit_on_two_workers_is_fit_of_one_process(workers: Workers, which: str) -> None:
    alone = fitted(which, False)
    for weights in workers(fitted, which, True):
        for ours, wanted in zip(weights, alone, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-6)


def _several_passes(average: bool, in_function: bool) -> Any:
    variable, own = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    optimizer.register_local_var(own)

    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, variable), (tf.constant(1.0), own)])

    run = tf.function(step) if in_function else step
    seen = []
    for number in range(4):
        run(tf.constant([1.0, 10.0]) * (number + 1) * (hvd.rank() + 1))
        seen.append([*variable.numpy().tolist(), own.numpy().item()])
    return seen, int(optimizer.iterations)


@pytest.mark.parametrize("in_function", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_passes_are_added_up_before_they_travel(
    workers: Workers, average: bool, in_function: bool
) -> None:
    # Passes 1 + 2 and 3 + 4, times 1 and 2 on the ranks, whose average is 1.5.
    size = 0.5 if average else 1.0
    first, second = 3 * 1.5 * size, (3 + 7) * 1.5 * size
    start, once, twice = (
        [1.0 - moved, 2.0 - 10 * moved, 1.0 - local * size]
        for moved, local in ((0, 0), (first, 1.0), (second, 2.0))
    )
    for seen, iterations in workers(_several_passes, average, in_function):
        np.testing.assert_allclose(seen, [start, once, once, twice])
        assert iterations == 4


def _sparse(as_dense: bool) -> Any:
    table = tf.Variable(tf.zeros([3, 1]))
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0), sparse_as_dense=as_dense, backward_passes_per_step=2
    )
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([hvd.rank()]), tf.constant([3, 1]))
    if not as_dense:
        with pytest.raises(ValueError, match="set sparse_as_dense=True"):
            optimizer.apply_gradients([(slices, table)])
        return None
    for _ in range(2):
        optimizer.apply_gradients([(slices, table)])
    return table.numpy().ravel().tolist()


def test_slices_of_several_passes_have_to_be_dense(workers: Workers) -> None:
    assert workers(_sparse, True) == [[-1.0, -1.0, 0.0]] * 2
    assert workers(_sparse, False) == [None, None]


def _saved_and_loaded(folder: str) -> Any:
    inputs, targets = samples()
    model = model_of(hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)))
    model.fit(of_this_rank(inputs), of_this_rank(targets), batch_size=BATCH, epochs=1, verbose=0)
    path = f"{folder}/{hvd.rank()}.keras"
    model.save(path)
    plain = tf.keras.models.load_model(path)
    ours = hvd_keras.load_model(path)
    states = [
        [v.numpy().tolist() for v in each.optimizer.variables] for each in (model, plain, ours)
    ]
    assert states[0] == states[1] == states[2]
    assert type(plain.optimizer) is tf.keras.optimizers.Adam
    before = model.get_weights()
    for each in (model, ours):
        each.fit(
            of_this_rank(inputs),
            of_this_rank(targets),
            batch_size=BATCH,
            epochs=1,
            verbose=0,
            shuffle=False,
        )
    assert not all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    return [weight.tolist() for weight in model.get_weights()], [
        weight.tolist() for weight in ours.get_weights()
    ]


def test_a_saved_model_loads_without_us_and_goes_on_with_us(
    workers: Workers, tmp_path: Path
) -> None:
    zero, one = workers(_saved_and_loaded, str(tmp_path))
    assert zero == one
    assert zero[0] == zero[1]


def test_the_optimizers_name_settings_and_state_are_kept() -> None:
    plain = tf.keras.optimizers.Adam(0.25, beta_1=0.5)
    variable = tf.Variable([1.0])
    plain.apply_gradients([(tf.constant([2.0]), variable)])
    ours = hvd.DistributedOptimizer(plain)
    assert type(ours).__name__ == "Adam"
    assert isinstance(ours, tf.keras.optimizers.Adam)
    assert ours.get_config() == plain.get_config()
    assert [v.numpy().tolist() for v in ours.variables] == [
        v.numpy().tolist() for v in plain.variables
    ]
    assert len(ours.variables()) == len(plain.variables)  # as scripts for Keras 2 write it


def test_keras_itself_is_as_it_was() -> None:
    """Only ``import horovod.tensorflow`` gives it words of Keras 2."""
    with pytest.raises(ValueError, match="lr"):
        tf.keras.optimizers.SGD(lr=0.1)
    with pytest.raises(TypeError, match="not callable"):
        tf.keras.optimizers.SGD().variables()
    assert not hasattr(tf.keras.Model, "reset_states")


def _partial() -> list[Any]:
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((1,)), layers.Dense(1), layers.Dense(1)])
    optimizer = hvd_keras.PartialDistributedOptimizer(
        tf.keras.optimizers.SGD(1.0), local_layers=model.layers[0]
    )
    before = [weight.numpy() for weight in model.trainable_weights]
    gradients = [tf.ones(weight.shape) * (hvd.rank() + 1) for weight in model.trainable_weights]
    optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    return [
        float(np.mean(old - new.numpy()))
        for old, new in zip(before, model.trainable_weights, strict=True)
    ]


def test_layers_can_be_left_to_each_rank(workers: Workers) -> None:
    for rank, moved in enumerate(workers(_partial)):
        own = (rank + 1) / 2  # divided by the number of ranks, as in Horovod
        np.testing.assert_allclose(moved, [own, own, 1.5, 1.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hvd_keras.PartialDistributedOptimizer(
                tf.keras.optimizers.SGD(), local_layers=[tf.keras.layers.Dense(1)]
            ),
            "has no variables yet; build the model first",
        ),
        (
            lambda: hvd.DistributedOptimizer("adam"),
            "takes a tf.keras.optimizers.Optimizer of Keras 3; this is a str",
        ),
        (
            lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(tf.keras.optimizers.SGD())),
            "is distributed already",
        ),
        (
            lambda: hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), backward_passes_per_step=0),
            "write 1 or more",
        ),
    ],
)
def test_what_cannot_be_made_distributed_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def _compiled() -> str:
    inputs, targets = samples()
    model = model_of(hvd.DistributedOptimizer(tf.keras.optimizers.SGD()), jit_compile=True)
    with pytest.raises(
        ValueError, match=r"set jit_compile=False \(in tf.function, or in model.compile\)"
    ) as refused:
        model.fit(inputs, targets, verbose=0)
    return type(refused.value).__name__


def test_a_model_that_xla_compiles_is_refused(workers: Workers) -> None:
    assert workers(_compiled) == ["UserError"] * 2
