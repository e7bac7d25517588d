"""The calls of MXNet's key-value store and trainer, and what becomes of each here."""

from __future__ import annotations

from pathlib import Path

from tests.peers.checkout import functions, methods
from tests.peers.peer_page import Parameters, Section

_PRIORITY = "differs: `priority` only orders what is sent"
_STORE = {
    "KVStore": "differs: `create` makes it",
    "broadcast": "",
    "is_capable": "",
    "init": "differs: rows are a `RowSparse`, or a sparse tensor with first values",
    "push": _PRIORITY,
    "pull": _PRIORITY,
    "pushpull": _PRIORITY,
    "row_sparse_pull": "differs: `out` is dense, with a row for each of `row_ids`",
    "set_gradient_compression": "differs: there are [more codecs](kvstore.md)",
    "set_optimizer": "differs: a name with options, or an optimizer of torch.optim; never code",
    "type": "",
    "rank": "",
    "num_workers": "",
    "save_optimizer_states": "",
    "load_optimizer_states": "",
}
_TRAINER = {
    "Trainer": "differs: `aggregate` says whether a step is the mean over all samples, or the sum",
    "learning_rate": "",
    "optimizer": "differs: an optimizer of torch.optim",
    "set_learning_rate": "",
    "step": "differs: gradients are set to None afterwards",
    "allreduce_grads": "",
    "update": "",
    "save_states": "",
    "load_states": "",
}
SECTIONS = {
    "mxnet.kv": Section(
        "mxnet.kv",
        "allhands.kvstore",
        {
            "create": "differs: other kinds of stores are refused, with the one to write",
            **{
                name if name == "KVStore" else f"KVStore.{name}": note
                for name, note in _STORE.items()
            },
        },
    ),
    "mxnet.gluon.Trainer": Section(
        "mxnet.gluon.Trainer",
        "allhands.kvstore",
        {name if name == "Trainer" else f"Trainer.{name}": note for name, note in _TRAINER.items()},
    ),
    "mxnet.gluon.utils": Section(
        "mxnet.gluon.utils", "allhands.kvstore", {"split_data": "", "split_and_load": ""}
    ),
}
# Of gluon.utils, what has to do with training on several devices.
_UTILS = ("split_data", "split_and_load", "clip_global_norm")


def found(checkout: Path) -> dict[str, dict[str, Parameters]]:
    """The calls that a checkout has, by section."""
    mxnet = checkout / "python" / "mxnet"
    store = methods(mxnet / "kvstore" / "kvstore.py", "KVStore")
    utils = functions(mxnet / "gluon" / "utils.py")
    others = ("KVStoreBase", "KVStoreServer", "BytePS", "Horovod", "TestStore")
    return {
        "mxnet.kv": {
            **functions(mxnet / "kvstore" / "base.py"),
            **store,
            "KVStore": (),
            **dict.fromkeys(others, ()),
        },
        "mxnet.gluon.Trainer": methods(mxnet / "gluon" / "trainer.py", "Trainer"),
        "mxnet.gluon.utils": {name: utils[name] for name in _UTILS},
    }
