"""How one data set is dealt out to clients: every sample to exactly one, decided by the seed alone.

Each function gives a `Clients`; `partition_of` takes their names, as run files and `Federated`
write them::

    partition="iid"
    partition={"name": "dirichlet", "alpha": 0.5, "min_size": 10}
    partition={"name": "classes", "per_client": 2}
    partition={"name": "quantity", "alpha": 0.5}
    partition={"name": "natural", "column": writers}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from allhands.data import derive_seed
from allhands.errors import UserError, did_you_mean
from allhands.federated.clients import Clients
from allhands.federated.samples import Samples

_TRIES = 1000  # draws of a Dirichlet partition before its minimum is called out of reach


def iid(num_samples: int, clients: int, seed: int = 0) -> Clients:
    """Every client gets as many samples as any other (one more or less), drawn from all.

    Args:
        num_samples: samples of the data set.
        clients: how many clients.
        seed: decides who gets which.
    """
    _enough(num_samples, clients, 1)
    order = _generator(seed).permutation(num_samples)
    return Clients.from_arrays(order, _shares(num_samples, np.ones(clients)))


def classes(targets: np.ndarray, clients: int, per_client: int = 2, seed: int = 0) -> Clients:
    """Every client sees `per_client` classes only: client i has class ``i mod classes`` and others
    drawn for it; the samples of a class are dealt out evenly to those who have it, as in Li et al.,
    Federated Learning on Non-IID Data Silos, ICDE 2022.

    Args:
        targets: class of each sample: integers, shape ``[samples]``.
        clients: how many clients; at least as many as there are classes, so that each class has a
            holder.
        per_client: classes of each.
        seed: decides who gets which.

    Raises:
        UserError: more classes a client than there are, or a class that nobody would hold.
    """
    known, place = np.unique(targets, return_inverse=True)
    if not 1 <= per_client <= len(known):
        raise UserError(
            f"per_client={per_client}; the data set has {len(known)} classes: write 1 to "
            f"{len(known)}"
        )
    if clients < len(known):
        raise UserError(
            f"clients={clients} with {len(known)} classes would leave a class without a client; "
            f"write clients={len(known)} or "
            "more, or partition={'name': 'dirichlet', 'alpha': 0.5}"
        )
    generator = _generator(seed)
    holders: list[list[int]] = [[] for _ in known]
    for client in range(clients):
        own = client % len(known)
        others = generator.permutation(len(known) - 1)[: per_client - 1]
        for held in [own, *(other + (other >= own) for other in others.tolist())]:
            holders[held].append(client)
    owner = np.empty(len(targets), dtype=np.int64)
    for number, who in enumerate(holders):
        members = generator.permutation(np.flatnonzero(place == number))
        counts = np.diff(_shares(len(members), np.ones(len(who))))
        owner[members] = np.repeat(who, counts)
    return _by_owner(owner, clients, generator)


def dirichlet(
    targets: np.ndarray, clients: int, alpha: float = 0.5, min_size: int = 10, seed: int = 0
) -> Clients:
    """The samples of each class are dealt out in proportions drawn from a Dirichlet distribution,
    as in Yurochkin et al., Bayesian Nonparametric Federated Learning, ICML 2019: a client that has
    its even share gets none of the next classes.

    Args:
        targets: class of each sample: integers, shape ``[samples]``.
        clients: how many clients.
        alpha: concentration; small: few classes a client, large: all alike.
        min_size: samples that every client has at least; all is drawn anew until they do.
        seed: decides who gets which.

    Raises:
        UserError: the minimum cannot be reached.
    """
    if not alpha > 0:
        raise UserError(
            f"alpha={alpha!r}; it must be above 0: 0.1 for few classes a client, 100 for nearly "
            "equal shares"
        )
    _enough(len(targets), clients, min_size)
    members = [np.flatnonzero(targets == label) for label in np.unique(targets)]
    generator, best = _generator(seed), 0
    for _ in range(_TRIES):
        sizes, parts = np.zeros(clients, dtype=np.int64), []
        for own in members:
            proportions = generator.dirichlet(np.full(clients, alpha)) * (
                sizes < len(targets) / clients
            )
            total = proportions.sum()
            offsets = _shares(len(own), proportions if total > 0 else np.ones(clients))
            sizes += np.diff(offsets)
            parts.append((own, offsets))
        best = max(best, int(sizes.min()))
        if sizes.min() >= min_size:
            owner = np.empty(len(targets), dtype=np.int64)
            for own, offsets in parts:
                owner[generator.permutation(own)] = np.repeat(np.arange(clients), np.diff(offsets))
            return _by_owner(owner, clients, generator)
    raise UserError(
        f"a Dirichlet partition with alpha={alpha:g} of {len(targets):,} samples to {clients} "
        f"clients gave no draw of {_TRIES} in which every client has min_size={min_size} samples "
        f"(the best had {best}); write a larger alpha, fewer clients, or min_size={best}"
    )


def quantity(
    num_samples: int,
    clients: int,
    alpha: float | None = None,
    weights: Sequence[float] | None = None,
    min_size: int = 1,
    seed: int = 0,
) -> Clients:
    """Clients differ in how many samples they have, which are drawn from all.

    Args:
        num_samples: samples of the data set.
        clients: how many clients.
        alpha: sizes are in proportions drawn from a Dirichlet distribution.
        weights: proportions instead; fewer than clients are repeated: ``[1, 3]`` gives every other
            client three times as much.
        min_size: samples that every client has at least, taken from the largest.
        seed: decides who gets which.
    """
    if (alpha is None) == (weights is None):
        raise UserError(
            "a partition by quantity needs either alpha= (Dirichlet) or weights= (proportions)"
        )
    _enough(num_samples, clients, min_size)
    generator = _generator(seed)
    if weights is not None:
        given = np.asarray(weights, dtype=np.float64)
        if given.ndim != 1 or not len(given) or (given <= 0).any() or clients % len(given):
            raise UserError(
                f"weights={list(weights)!r}; they must be positive, and as many as "
                f"clients={clients}, or a number that divides it"
            )
        proportions = np.tile(given, clients // len(given))
    else:
        assert alpha is not None
        if not alpha > 0:
            raise UserError(
                f"alpha={alpha!r}; it must be above 0: small for very different sizes, large for "
                "equal ones"
            )
        proportions = generator.dirichlet(np.full(clients, alpha))
    # What is above the minimum is dealt out in proportion, so that nobody falls below it.
    sizes = min_size + np.diff(_shares(num_samples - clients * min_size, proportions))
    return Clients.from_arrays(
        generator.permutation(num_samples), np.concatenate([[0], np.cumsum(sizes)])
    )


def natural(column: Any, min_size: int = 1, small: str = "refuse") -> Clients:
    """One client for each value of a column: the writer of a digit, the speaker of a line, the
    hospital of a patient.

    Args:
        column: value of each sample: numbers or strings, shape ``[samples]``; or
            ``"FILE.npz:NAME"``, an array in a NumPy file.
        min_size: samples that a client has at least.
        small: what becomes of clients with fewer: "refuse" the partition, or "merge" them all into
            one called "others".

    Raises:
        UserError: a client is too small, or the column cannot be read.
    """
    if small not in ("refuse", "merge"):
        raise UserError(f"small={small!r}; write 'refuse' or 'merge'")
    values = _column(column) if isinstance(column, (str, Path)) else np.asarray(column)
    if values.ndim != 1:
        raise UserError(
            f"the column has shape {list(values.shape)}; it must hold one value a sample"
        )
    known, owner = np.unique(values, return_inverse=True)
    sizes = np.bincount(owner, minlength=len(known))
    names = [str(value) for value in known]
    if (sizes < min_size).any():
        few = np.flatnonzero(sizes < min_size)
        if small == "refuse":
            raise UserError(
                f"{len(few)} of {len(known)} clients have fewer than min_size={min_size} samples, "
                f"such as {names[few[0]]!r} with "
                f"{sizes[few[0]]}; write a smaller min_size, or small='merge'"
            )
        kept = np.flatnonzero(sizes >= min_size)
        place = np.full(len(known), len(kept), dtype=np.int64)
        place[kept] = np.arange(len(kept))
        owner, names = place[owner], [*(names[i] for i in kept), "others"]
    made = _by_owner(owner, len(names))
    return Clients.from_arrays(made.indices.numpy(), made.offsets, names)


def folders(
    root: str | Path, extensions: Sequence[str] = (".jpg", ".jpeg", ".png", ".bmp", ".npy", ".pt")
) -> tuple[list[Path], Clients]:
    """One client for each folder in `root`, with the files that lie anywhere below it, in the order
    of their names.

    Returns:
        The files, for a data set that reads them by index, and who holds which.

    Raises:
        UserError: no folder, or one without such a file.
    """
    base = Path(root).expanduser()
    found = sorted(path for path in base.iterdir() if path.is_dir()) if base.is_dir() else []
    if not found:
        raise UserError(
            f"{base} has no folders in it; clients are the folders right below it, one each"
        )
    files, offsets = [], [0]
    for folder in found:
        own = sorted(path for path in folder.rglob("*") if path.suffix.lower() in extensions)
        if not own:
            raise UserError(
                f"the client {folder.name!r} has no file with the extension "
                f"{', '.join(extensions)} in {folder}"
            )
        files += own
        offsets.append(len(files))
    return files, Clients.from_arrays(
        np.arange(len(files)), np.array(offsets), [folder.name for folder in found]
    )


# ---------------------------------------------------------------------- by name

_KNOWN: dict[str, Callable[..., Clients]] = {
    "iid": iid,
    "classes": classes,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "natural": natural,
}


def partition_of(given: Any, samples: Samples, clients: int | None, seed: int) -> Clients:
    """The clients that `given` describes, every sample with exactly one of them.

    Args:
        given: the name of a partition, or ``{"name": …, option: …}``; a `Clients`; a list of index
            lists; or a function ``(targets, clients, seed)`` to index lists, where `targets` is
            None if the data set does not show them.
        samples: the data set.
        clients: how many, where `given` does not say.
        seed: decides who gets which, unless the options have a seed of their own.
    """
    if isinstance(given, Clients):
        made = given
    elif isinstance(given, (list, tuple)):
        made = Clients(given)
    elif isinstance(given, str) or (isinstance(given, dict) and "name" in given):
        made = _named({"name": given} if isinstance(given, str) else given, samples, clients, seed)
    elif callable(given):
        targets = samples.targets()
        made = Clients(given(None if targets is None else targets.numpy(), clients, seed))
    else:
        raise UserError(
            f"partition={given!r} is not known; write one of {', '.join(map(repr, _KNOWN))}, "
            f"{{'name': …, option: …}}, a list of "
            "index lists, a function (targets, clients, seed), or a Clients"
        )
    if clients is not None and clients != len(made):
        raise UserError(
            f"clients={clients}, and the partition has {len(made)}; remove clients=, or make them "
            "agree"
        )
    made.check_exact(len(samples))
    empty = np.flatnonzero(made.sizes == 0)
    if len(empty):
        raise UserError(
            f"{len(empty)} of {len(made)} clients have no sample, such as client "
            f"{made.name(int(empty[0]))}; leave them out of the partition, or write fewer clients"
        )
    return made


def _named(given: dict[str, Any], samples: Samples, clients: int | None, seed: int) -> Clients:
    options = {key: value for key, value in given.items() if key != "name"}
    name = str(given["name"])
    if name not in _KNOWN:
        hint = did_you_mean(name, _KNOWN)
        raise UserError(f"there is no partition {name!r}{hint} Known are: {', '.join(_KNOWN)}")
    takes = inspect.signature(_KNOWN[name]).parameters
    own = [option for option in takes if option not in ("num_samples", "targets", "clients")]
    for option in options:
        if option not in own:
            hint = did_you_mean(option, own)
            raise UserError(
                f"the partition {name!r} has no option {option!r}{hint} It takes: {', '.join(own)}"
            )
    if "clients" in takes:
        if clients is None:
            raise UserError(f"partition={name!r} needs the number of clients; write clients=10")
        options |= {"clients": clients, "seed": options.get("seed", seed)}
    if "num_samples" in takes:
        options["num_samples"] = len(samples)
    if "targets" in takes:
        targets = samples.targets()
        if targets is None or targets.dim() != 1 or targets.is_floating_point():
            if targets is None:
                what = "does not show its targets"
            else:
                what = f"has targets of shape {list(targets.shape)}, {targets.dtype}"
            raise UserError(
                f"partition={name!r} goes by classes, and the data set {what}; give it an "
                "attribute `targets` with one integer a sample, or partition= a list of index lists"
            )
        options["targets"] = targets.numpy()
    made: Clients = _KNOWN[name](**options)
    return made


def _column(where: str | Path) -> np.ndarray:
    path, _, name = str(where).rpartition(":")
    file = Path(path).expanduser()
    if not path or not file.is_file():
        raise UserError(
            f"column={str(where)!r}; write one value a sample, or 'FILE.npz:NAME' of a NumPy file "
            "that exists"
        )
    with np.load(file, allow_pickle=False) as arrays:
        if name not in arrays:
            raise UserError(f"{file} has no array {name!r}; it has {', '.join(arrays)}")
        values: np.ndarray = arrays[name]
    return values


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, "partition"))


def _shares(total: int, proportions: np.ndarray) -> np.ndarray:
    """Where each share of `total` items begins and ends when they are dealt out in proportion:
    int64, shape ``[shares + 1]``."""
    ends = np.cumsum(proportions, dtype=np.float64)
    bounds = np.floor(ends / ends[-1] * total + 1e-9).astype(np.int64)
    bounds[-1] = total
    return np.concatenate([[0], bounds])


def _by_owner(
    owner: np.ndarray, clients: int, generator: np.random.Generator | None = None
) -> Clients:
    """Clients from the owner of each sample; each client's samples in the data set's order, or
    shuffled by `generator`."""
    if generator is None:
        order = np.argsort(owner, kind="stable")
    else:
        mixed = generator.permutation(len(owner))
        order = mixed[np.argsort(owner[mixed], kind="stable")]
    return Clients.from_arrays(
        order, np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))])
    )


def _enough(num_samples: int, clients: int, min_size: int) -> None:
    if clients * min_size > num_samples:
        raise UserError(
            f"{clients} clients with at least min_size={min_size} samples each need "
            f"{clients * min_size:,}, and the "
            f"data set has {num_samples:,}; write at most clients={num_samples // max(min_size, 1)}"
        )
