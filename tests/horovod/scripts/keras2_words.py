"""A script for Keras 2 and Horovod: its words give what those of Keras 3 give."""

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
layers = tf.keras.layers
random = np.random.default_rng(hvd.rank())
inputs = random.standard_normal((48, 6)).astype(np.float32)
labels = (inputs.sum(axis=1) > 0).astype(np.int64)


def model():
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(2)]
    )


def dataset():
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).repeat().batch(8)


def callbacks(rate):
    return [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2),
    ]


rate = 0.01 * hvd.size()
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)

old = model()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(lr=rate, momentum=0.9))
old.compile(
    loss=loss, optimizer=optimizer, metrics=["accuracy"], experimental_run_tf_function=False
)
old.fit_generator(dataset(), 6, epochs=3, verbose=0, callbacks=callbacks(rate), workers=2)
score = old.evaluate_generator(dataset(), 6)

new = model()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(learning_rate=rate, momentum=0.9))
new.compile(loss=loss, optimizer=optimizer, metrics=["accuracy"])
new.fit(dataset(), steps_per_epoch=6, epochs=3, verbose=0, callbacks=callbacks(rate))
assert score == new.evaluate(dataset(), steps=6), score
for ours, wanted in zip(old.get_weights(), new.get_weights(), strict=True):
    np.testing.assert_array_equal(ours, wanted)

# The rate of Keras 2 falls with each step.
weight = tf.Variable(1.0)
optimizer = tf.keras.optimizers.SGD(lr=0.5, decay=0.25)
for step in range(3):
    before = float(weight)
    optimizer.apply_gradients([(tf.constant(1.0), weight)])
    np.testing.assert_allclose(before - float(weight), 0.5 / (1 + 0.25 * step), rtol=1e-6)

optimizer = tf.optimizers.Adam(0.1)
optimizer.build([weight])
assert [v.path for v in optimizer.variables()] == [v.path for v in optimizer.variables]
optimizer.lr.assign(0.5)
assert float(optimizer.learning_rate) == 0.5
optimizer.lr = 0.25
assert float(optimizer.learning_rate) == 0.25
tf.keras.backend.set_value(optimizer.lr, 0.125)
assert float(optimizer.lr) == 0.125

mean = tf.keras.metrics.Mean()
mean.update_state(3.0)
mean.reset_states()
assert float(mean.result()) == 0.0

stateful = tf.keras.Sequential(
    [layers.Input((2, 1), batch_size=1), layers.LSTM(1, stateful=True), layers.Dense(1)]
)
stateful.predict(np.ones((1, 2, 1)), verbose=0)
assert any(float(tf.reduce_sum(tf.abs(state))) for state in stateful.layers[0].states)
stateful.reset_states()
assert not any(float(tf.reduce_sum(tf.abs(state))) for state in stateful.layers[0].states)

print(f"rank {hvd.rank()}: weights {sum(float(np.abs(w).sum()) for w in old.get_weights()):.6f}")
