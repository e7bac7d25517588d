"""Handwritten digits with Horovod and Keras, as its users' scripts do it: a rate that warms up,
metrics of all workers."""

import argparse
import os

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--data", default=os.environ.get("ALLHANDS_DATA", "."))
parser.add_argument("--samples", type=int, default=2048)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

with np.load(os.path.join(args.data, "mnist_train.npz")) as file:
    images, labels = file["x"][: args.samples], file["y"][: args.samples]
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1000, seed=hvd.rank()).batch(32)

layers = tf.keras.layers
model = tf.keras.Sequential(
    [
        layers.Conv2D(8, [3, 3], activation="relu"),
        layers.Conv2D(16, [3, 3], activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Dropout(0.25),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
        layers.Dropout(0.5),
        layers.Dense(10, activation="softmax"),
    ]
)

scaled_lr = 0.002 * hvd.size()
opt = hvd.DistributedOptimizer(
    tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))

history = model.fit(
    dataset,
    steps_per_epoch=args.samples // 32 // hvd.size(),
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=0,
).history
weights = sum(float(np.abs(weight).sum()) for weight in model.get_weights())
print(
    f"rank {hvd.rank()} of {hvd.size()}: accuracy {history['accuracy'][-1]:.4f}, weights "
    f"{weights:.6f}"
)
