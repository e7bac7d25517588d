"""The CIFAR-100 script of the AI4OS guide on distributed learning, which trains with Horovod, on
TensorFlow 2.16 and newer.

    allhands launch -n 2 train.py          # or: python train.py, alone
    allhands launch -n 2 train.py 200      # 200 steps over all workers instead of 10000

Against the document: its two import lines; `opt.variables`, which Keras 3 does not let one call;
each worker takes its own share of
the images (the document's never shards them); the number of steps may be given. Nothing else of it
is changed.

The variable ALLHANDS_DATA names the folder that holds `cifar-100-binary` or `cifar-100-python`;
without it Keras downloads CIFAR-100.
"""

import sys

import tensorflow as tf
import cifar100
import allhands.horovod.tensorflow as hvd
from tensorflow.keras.models import Sequential
from tensorflow.keras.layers import Conv2D
from tensorflow.keras.layers import MaxPooling2D
from tensorflow.keras.layers import BatchNormalization
from tensorflow.keras.layers import Dropout
from tensorflow.keras.layers import Flatten
from tensorflow.keras.layers import Dense
from tensorflow.keras.utils import to_categorical

# Initialize Horovod
hvd.init()

# Pin GPU to be used to process local rank (one GPU per process)
gpus = tf.config.experimental.list_physical_devices('GPU')
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')

# Read the process the data
(x_train, y_train), (x_test, y_test) = cifar100.load_data()
x_train = x_train.astype('float32') / 255.0
x_test = x_test.astype('float32') / 255.0
y_train = to_categorical(y_train, 100)
y_test = to_categorical(y_test, 100)

dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
# Not in the document, whose workers all train on all images: each takes its share of them.
dataset = dataset.shard(hvd.size(), hvd.rank())
dataset = dataset.repeat().shuffle(10000).batch(128)

# Create the model to be trained:
model = Sequential([
    Conv2D(32, (3, 3), activation='relu', input_shape=(32, 32, 3)),
    MaxPooling2D((2, 2)),
    Conv2D(64, (3, 3), activation='relu'),
    MaxPooling2D((2, 2)),
    Conv2D(64, (3, 3), activation='relu'),
    Flatten(),
    Dense(64, activation='relu'),
    Dense(100, activation='softmax')
])

loss = tf.losses.CategoricalCrossentropy()
opt = tf.optimizers.Adam(0.001 * hvd.size())
metrics = ['accuracy']
model.compile(optimizer=opt, loss=loss, metrics=metrics)

checkpoint_dir = './checkpoints'
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)

@tf.function
def training_step(x_train, y_train, first_batch):
    with tf.GradientTape() as tape:
        probs = model(x_train, training=True)
        loss_value = loss(y_train, probs)

    # Add Horovod Distributed GradientTape.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))

    # Broadcast initial variable states from rank 0 to all other processes.
    # This is necessary to ensure consistent initialization of all workers when
    # training is started with random weights or restored from a checkpoint.
    # Note: broadcast should be done after the first gradient step to ensure optimizer
    # initialization.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)

    return loss_value

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10000

# Horovod: adjust number of steps based on number of GPUs.
for batch, (x_train, y_train) in enumerate(dataset.take(steps // hvd.size())):
    loss_value = training_step(x_train, y_train, batch == 0)

    if batch % 10 == 0 and hvd.local_rank() == 0:
        print('Step #%d\tLoss: %.6f' % (batch, loss_value))

# Save checkpoints only on one worker (e.g. worker 0):
if hvd.rank() == 0:
    checkpoint.save(checkpoint_dir)
