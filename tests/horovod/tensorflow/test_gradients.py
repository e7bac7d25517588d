"""The distributed tape against one process that sees all samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import allhands.horovod.tensorflow as hvd
from allhands.horovod.tensorflow.gradients import _BUCKET_BYTES, GradientReduction
from tests.horovod.tensorflow.workers import Workers

pytestmark = pytest.mark.serial

BATCH = 6  # of each of two workers


def network() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            layers.Conv2D(
                4, 3, activation="relu", kernel_initializer=tf.keras.initializers.GlorotUniform(1)
            ),
            layers.Flatten(),
            layers.Dense(5, kernel_initializer=tf.keras.initializers.GlorotUniform(2)),
        ]
    )


def samples(step: int) -> tuple[Any, Any]:
    random = np.random.default_rng(step)
    images = random.standard_normal((2 * BATCH, 8, 8, 3)).astype(np.float32)
    return tf.constant(images), tf.constant(random.integers(0, 5, 2 * BATCH))


def trained(distributed: bool, in_function: bool, **options: Any) -> list[Any]:
    """The weights after four steps of Adam."""
    model, optimizer = network(), tf.keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        if distributed:
            tape = hvd.DistributedGradientTape(tape, **options)
        optimizer.apply_gradients(
            zip(
                tape.gradient(value, model.trainable_variables),
                model.trainable_variables,
                strict=True,
            )
        )

    run = tf.function(step) if in_function else step
    for number in range(4):
        images, labels = samples(number)
        here = slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH) if distributed else slice(None)
        run(images[here], labels[here])
    return [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.parametrize("in_function", [True, False])
def test_two_workers_train_as_one_process_with_all_samples(
    workers: Workers, in_function: bool
) -> None:
    alone = trained(False, in_function)
    for weights in workers(trained, True, in_function):
        for ours, wanted in zip(weights, alone, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-6)


def _trained_with_options() -> list[list[Any]]:
    plain = trained(True, True)
    return [
        [
            np.abs(ours - wanted).max()
            for ours, wanted in zip(trained(True, True, **options), plain, strict=True)
        ]
        for options in (
            {"groups": 2},
            {"gradient_predivide_factor": 2.0},
            {"compression": hvd.Compression.fp16},
        )
    ]


def test_groups_and_predivision_change_rounding_only_and_compression_little(
    workers: Workers,
) -> None:
    for grouped, predivided, narrowed in workers(_trained_with_options):
        assert max(grouped) < 1e-6
        assert max(predivided) < 1e-6
        assert 0 < max(narrowed) < 0.02  # of a rate of 0.01, four times


def _special() -> list[Any]:
    rank = hvd.rank()
    table, weight, unused, own = (
        tf.Variable(tf.ones([4, 2])),
        tf.Variable([1.0, 2.0]),
        tf.Variable(1.0),
        tf.Variable(3.0),
    )

    def gradients(**options: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, [0, 1 + rank])
            loss = tf.reduce_sum(rows * weight) * (rank + 1) + own * (rank + 1)
        tape = hvd.DistributedGradientTape(tape, **options)
        tape.register_local_source(own)
        slices, dense, missing, local = tape.gradient(loss, [table, weight, unused, own])
        assert missing is None
        sparse = isinstance(slices, tf.IndexedSlices)
        return [
            sparse,
            tf.convert_to_tensor(slices).numpy().tolist(),
            dense.numpy().tolist(),
            local.numpy().item(),
        ]

    return [
        gradients(),
        gradients(sparse_as_dense=True),
        gradients(op=hvd.Sum, scale_local_gradients=False),
    ]


def test_slices_missing_gradients_and_local_sources(workers: Workers) -> None:
    table = [[1.5, 3.0], [0.5, 1.0], [1.0, 2.0], [0.0, 0.0]]
    for rank, (sparse, dense, summed) in enumerate(workers(_special)):
        assert sparse == [True, table, [3.0, 3.0], (rank + 1) / 2]
        assert dense == [False, table, [3.0, 3.0], (rank + 1) / 2]
        assert summed == [True, (2 * np.array(table)).tolist(), [6.0, 6.0], rank + 1]


def _layers_left_alone() -> list[Any]:
    first, second = (
        tf.keras.layers.Dense(1, kernel_initializer="ones"),
        tf.keras.layers.Dense(1, kernel_initializer="ones"),
    )
    value = tf.ones([1, 1]) * (hvd.rank() + 1)
    with tf.GradientTape(persistent=True) as tape:
        loss = second(first(value))
    partial = hvd.PartialDistributedGradientTape(tape, local_layers=first)
    local, shared = partial.get_local_and_global_gradients(loss, [first.kernel, second.kernel])
    nested = hvd.DistributedGradientTape(tape).gradient(loss, {"kernel": second.kernel})
    return [
        local[0][1].numpy().item(),
        shared[0][1].numpy().item(),
        nested["kernel"].numpy().item(),
    ]


def test_partial_tape_leaves_layers_to_each_rank(workers: Workers) -> None:
    assert workers(_layers_left_alone) == [[0.5, 1.5, 1.5], [1.0, 1.5, 1.5]]


def _two_tapes() -> list[float]:
    one, two = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            a, b = one * (hvd.rank() + 1), two * 10 * (hvd.rank() + 1)
        return [
            hvd.DistributedGradientTape(first).gradient(a, [one])[0],
            hvd.DistributedGradientTape(second).gradient(b, [two])[0],
        ]

    return [gradient.numpy().item() for gradient in step()]


def test_two_tapes_in_one_function_do_not_mix(workers: Workers) -> None:
    assert workers(_two_tapes) == [[1.5, 15.0]] * 2


def _differing_variables() -> str:
    weights = [tf.Variable(tf.ones([3 + hvd.rank()]), name="kernel")]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights[0])
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.DistributedGradientTape(tape).gradient(loss, weights)
    return str(error.value)


def test_a_variable_of_another_shape_is_named(workers: Workers) -> None:
    for text in workers(_differing_variables):
        for word in ("kernel", "rank 0", "[3]", "rank 1", "[4]"):
            assert word in text, text


@pytest.fixture
def three() -> tuple[list[Any], dict[int, Any]]:
    sizes = [_BUCKET_BYTES // 8, _BUCKET_BYTES // 8, _BUCKET_BYTES // 4]
    variables = [tf.Variable(tf.zeros([size])) for size in sizes]
    return variables, dict(enumerate(tf.zeros([size]) for size in sizes))


def test_buckets_are_of_about_one_size_the_last_gradients_first(three: Any) -> None:
    variables, gradients = three
    assert GradientReduction("tape")._buckets(gradients, variables) == [[2], [1, 0]]


def test_groups_are_those_that_were_asked_for(three: Any) -> None:
    variables, gradients = three
    assert GradientReduction("tape", groups=1)._buckets(gradients, variables) == [[2, 1, 0]]
    assert GradientReduction("tape", groups=3)._buckets(gradients, variables) == [[2], [1], [0]]
    together = GradientReduction("tape", groups=[[variables[0], variables[2]]])
    assert together._buckets(gradients, variables) == [[2, 0], [1]]
    with pytest.warns(DeprecationWarning, match="write groups"):
        assert GradientReduction("tape", num_groups=2)._buckets(gradients, variables) == [
            [2, 1],
            [0],
        ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, "groups=0: write a number of groups from 1"),
        (
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            "gradient_predivide_factor=2.0 needs op=Average; it is op=Sum",
        ),
        ({"op": "average"}, "op='average' is no reduction"),
        ({"device_dense": "/gpu:0"}, "leave device_dense out"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hvd.DistributedGradientTape(tf.GradientTape(), **options)


def test_only_tapes_are_wrapped() -> None:
    with pytest.raises(ValueError, match=r"takes a tf.GradientTape; this is a \w+"):
        hvd.DistributedGradientTape(tf.keras.optimizers.SGD())
