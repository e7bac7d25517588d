"""Handwritten digits with Horovod's gradient tape, as its users' scripts for TensorFlow 2 do it."""

import argparse
import os

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data", default=os.environ.get("ALLHANDS_DATA", "."))
parser.add_argument("--samples", type=int, default=512)
args = parser.parse_args()

hvd.init()
with np.load(os.path.join(args.data, "mnist_train.npz")) as file:
    images, labels = file["x"][: args.samples], file["y"][: args.samples]
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(1000, seed=hvd.rank()).batch(32)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.001 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return loss_value


losses = []
for batch, (images, labels) in enumerate(dataset.take(60 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    losses.append(float(loss_value))
if hvd.rank() == 0:
    checkpoint.save("./checkpoints")
weights = sum(float(np.abs(weight).sum()) for weight in model.get_weights())
print(f"rank {hvd.rank()}: weights {weights:.6f}, better {losses[-1] < losses[0]}")
