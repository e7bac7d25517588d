"""Parts of Horovod that are not here, and what to use instead."""

from __future__ import annotations

# Each sentence begins after "use".
ABSENT = {
    "horovod.mxnet": "allhands.kvstore, which has the names of MXNet's store, with PyTorch",
    "horovod.ray": "`allhands launch -H host:slots script.py`, or allhands.launch.spawn",
    "horovod.spark": "`allhands launch -H host:slots script.py` on files that the Spark job writes",
    "horovod.run": "`allhands launch --horovod -np 4 script.py`, or "
    "allhands.launch.spawn(function, args, workers=4)",
    "horovod.runner": "`allhands launch --horovod -np 4 script.py`, or "
    "allhands.launch.spawn(function, args, workers=4)",
    "horovod.tensorflow.data": "tf.data in each worker: dataset.shard(hvd.size(), hvd.rank())",
}
