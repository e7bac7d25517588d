"""A CIFAR-100 step of TensorFlow with the distributed tape, beside one whose gradients are
exchanged by hand.

    make tensorflow-env
    .venv-tensorflow/bin/python benchmarks/horovod_tensorflow.py [--workers 2] [--model guide|wide]
    [--out NAME]

The model and batch are those of examples/horovod_cifar100 (0.13 million weights, 128 images a
worker); "wide" has 10.7 million in
dense layers, so that the exchange weighs more. By hand: one Python function in the graph that joins
all gradients in one array,
sums it with torch.distributed over gloo, and cuts it again. The two, and a step without an
exchange, take turns in the same processes; the ratio is the median over the pairs of blocks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from report import machine, save_json, summarize

from allhands.launch import spawn

CONTENDERS = ("by hand", "horovod", "no exchange")


def guides_model() -> Any:
    import tensorflow as tf

    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(32, (3, 3), activation="relu"),
            layers.MaxPooling2D((2, 2)),
            layers.Conv2D(64, (3, 3), activation="relu"),
            layers.MaxPooling2D((2, 2)),
            layers.Conv2D(64, (3, 3), activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(100, activation="softmax"),
        ]
    )


def wide_model() -> Any:
    import tensorflow as tf

    layers = tf.keras.layers
    dense = [layers.Dense(2048, activation="relu"), layers.Dense(2048, activation="relu")]
    return tf.keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Flatten(),
            *dense,
            layers.Dense(100, activation="softmax"),
        ]
    )


def exchanged_by_hand(gradients: list[Any]) -> list[Any]:
    """The gradients averaged over the workers, in one message."""
    import tensorflow as tf
    import torch
    import torch.distributed as dist

    def exchange(*arrays: Any) -> list[Any]:
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        ends = np.cumsum([array.size for array in arrays])[:-1]
        return [
            part.reshape(array.shape)
            for part, array in zip(np.split(flat.numpy(), ends), arrays, strict=True)
        ]

    results = tf.numpy_function(exchange, gradients, [gradient.dtype for gradient in gradients])
    for result, gradient in zip(results, gradients, strict=True):
        result.set_shape(gradient.shape)
    return list(results)


def contender(name: str, model: Any, batch: int) -> Callable[[], Any]:
    """A function that makes one training step."""
    import tensorflow as tf

    import allhands.horovod.tensorflow as hvd

    optimizer, loss = tf.keras.optimizers.Adam(0.001), tf.keras.losses.CategoricalCrossentropy()
    optimizer.build(model.trainable_variables)
    images = tf.random.normal([batch, 32, 32, 3])
    labels = tf.one_hot(tf.random.uniform([batch], maxval=100, dtype=tf.int32), 100)

    @tf.function(autograph=False)
    def step() -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        if name == "horovod":
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        if name == "by hand":
            gradients = exchanged_by_hand(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    return step


def measure(model: str, batch: int, steps: int, blocks: int) -> dict[str, list[float]]:
    """Milliseconds a step, block by block, of each contender; in a worker."""
    import tensorflow as tf

    import allhands.horovod.tensorflow as hvd

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    make = {"guide": guides_model, "wide": wide_model}[model]
    contenders = {name: contender(name, make(), batch) for name in CONTENDERS}
    samples: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for block in range(blocks + 1):  # the first one warms up
        for name in CONTENDERS[:: 1 if block % 2 else -1]:
            hvd.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                value = contenders[name]()
            value.numpy()
            if block:
                samples[name].append(1000 * (time.perf_counter() - began) / steps)
    hvd.shutdown()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=["guide", "wide"], default="guide")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--out", default="horovod_tensorflow")
    args = parser.parse_args()
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    samples = spawn(
        measure, (args.model, args.batch, args.steps, args.blocks), workers=args.workers, env=env
    )[0]
    found = summarize(samples, "by hand")
    version = importlib.metadata.version("tensorflow-cpu")
    settings = {
        name: getattr(args, name) for name in ("workers", "model", "batch", "steps", "blocks")
    }
    save_json(
        args.out,
        {"machine": machine(), "tensorflow": version, **settings, "unit": "ms a step", **found},
    )
    medians = ", ".join(f"{name} {found['median'][name]:.1f}" for name in CONTENDERS)
    print(f"ms a step: {medians}; horovod takes {found['ratio']['horovod']:.3f} of by hand")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
