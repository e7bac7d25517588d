"""From what the user passed (`loaders` or `datasets`) to one feed a loader, honouring or refusing
every setting by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from allhands.checks import check_bare, check_whole
from allhands.data.agree import share_data
from allhands.data.feed import Feed, InMemoryFeed
from allhands.data.loaders import LoaderFeed
from allhands.data.random import derive_seed, preserved_generators, seed_everything
from allhands.data.sources import BatchSource, OrderSource, Sampled, Sequential, Shuffled
from allhands.data.split import SplitFeed, taken_as
from allhands.data.streams import IterableFeed
from allhands.errors import UserError, kind_of
from allhands.world import World

# DataLoader arguments that say how samples are read; they are passed on as they are.
_READING = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)
# DataLoader arguments that say which samples make a batch.
_BATCHING = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")

_CATALYST_ONLY = {
    "per_gpu_scaling": "batch_size is per worker already; remove it",
    "loaders_params": 'write the options beside the data set: "train": {"dataset": ds, '
    '"batch_size": 64}',
    "samplers_params": 'write the sampler beside the data set: "train": {"dataset": ds, "sampler": '
    "sampler}",
}


@dataclass
class Source:
    """One loader as the user described it, before any process has read from it."""

    name: str
    dataset: Any
    batch_size: int | None = 1
    shuffle: bool = False
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether this loader is trained on: its name begins with "train"."""
        return self.name.startswith("train")


def build_feeds(
    sources: Mapping[str, Source],
    world: World,
    seed: int,
    accumulate: int = 1,
    same_everywhere: bool = False,
    place: tuple[int, int] | None = None,
    level: bool = False,
    began_with: int | None = None,
) -> dict[str, Feed]:
    """One feed a source.

    Args:
        sources: as the user described them.
        world: the processes.
        seed: of the samples' order.
        accumulate: micro-batches in a step of a loader that is trained on.
        same_everywhere: skip the check that all ranks hold the same data, for data that one process
            has sent to all.
        place: whose share of the samples this rank gets, and among how many; None gives each rank
            one of its own.
        level: give all ranks the same number of micro-batches in every step, see
            `allhands.data.feed`.
        began_with: the number of shares with which the training began, where members of the world
            have changed since; the global batch stays what it was.

    Raises:
        UserError: a setting cannot be honoured in this world; the message names it and its
            replacement.
    """
    feeds = {}
    for name, source in sources.items():
        if not same_everywhere:
            source.dataset = share_data(name, source.dataset, world)
        feeds[name] = _build_feed(
            source, world, seed, accumulate if source.trains else 1, place, level, began_with
        )
    return feeds


def sources_from_loaders(loaders: Any) -> dict[str, Source]:
    """Read the settings of ready-made DataLoaders, ``{"train": DataLoader, "valid":
    DataLoader}``."""
    if not isinstance(loaders, Mapping) or not loaders:
        raise UserError(
            f'loaders must be a dict of names to DataLoaders, such as {{"train": loader, "valid": '
            f"loader}}; "
            f"got {kind_of(loaders)}"
        )
    return {str(name): _source_from_loader(str(name), loader) for name, loader in loaders.items()}


def sources_from_datasets(datasets: Any, seed: int) -> dict[str, Source]:
    """Read the ``datasets=`` form: options for all loaders, and either data sets by name or a
    function that makes them.

    ``{"batch_size": 32, "num_workers": 1, "train": ds, "valid": ds}``; a value may also be
    ``{"dataset": ds, **options}``. With ``{"get_datasets_fn": fn, **kwargs}`` the keys that are no
    loader options are passed to ``fn``, which is called with the global generators seeded alike on
    every rank.
    """
    if not isinstance(datasets, Mapping):
        raise UserError(
            f'datasets must be a dict such as {{"batch_size": 32, "train": ds, "valid": ds}}; got '
            f"{kind_of(datasets)}"
        )
    given = dict(datasets)
    for key, advice in _CATALYST_ONLY.items():
        if key in given:
            raise UserError(f"datasets[{key!r}] is not supported: {advice}")
    common = {key: given.pop(key) for key in (*_READING, "batch_size", "drop_last") if key in given}
    make = given.pop("get_datasets_fn", None)
    if make is not None:
        given = _call_get_datasets(make, given, seed)
    if not given:
        raise UserError('datasets names no data set; add at least "train": dataset')
    sources = {}
    for name, value in given.items():
        own = dict(value) if isinstance(value, Mapping) else {"dataset": value}
        dataset = own.pop("dataset", None)
        unknown = set(own) - {*_READING, *_BATCHING}
        if not isinstance(dataset, Dataset) and not (
            hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
        ):
            raise UserError(
                f"datasets[{name!r}] is {kind_of(value)}; it must be a data set, or a dict with a "
                "key 'dataset'. Loader options "
                f"are: {', '.join(('batch_size', 'drop_last', *_READING))}"
            )
        if unknown:
            raise UserError(
                f"datasets[{name!r}] has unknown option(s) {sorted(unknown)}; known are "
                f"{(*_READING, *_BATCHING)}"
            )
        settings = {**common, **own}
        iterable = isinstance(dataset, IterableDataset)
        batching = {key: settings.pop(key) for key in _BATCHING if key in settings}
        if "batch_sampler" in batching and {"batch_size", "shuffle", "sampler", "drop_last"} & set(
            own
        ):
            raise UserError(
                f"datasets[{name!r}]: batch_sampler excludes batch_size, shuffle, sampler and "
                "drop_last; keep one of them"
            )
        if batching.get("sampler") is None and "batch_sampler" not in batching:
            batching.setdefault("shuffle", str(name).startswith("train") and not iterable)
        elif batching.get("shuffle"):
            raise UserError(
                f"datasets[{name!r}]: sampler and shuffle=True exclude each other; keep one of them"
            )
        _refuse_distributed_sampler(str(name), batching.get("sampler"))
        sources[str(name)] = Source(str(name), dataset, options=settings, **batching)
    return sources


def _call_get_datasets(make: Any, kwargs: dict[str, Any], seed: int) -> dict[str, Any]:
    try:
        inspect.signature(make).bind(**kwargs)
    except TypeError as error:
        name = getattr(make, "__name__", repr(make))
        raise UserError(
            f"get_datasets_fn={name} cannot be called with the remaining keys {sorted(kwargs)}: "
            f"{error}. Keys of datasets that are no loader options "
            f"({', '.join(('batch_size', 'drop_last', *_READING))}) are passed to it"
        ) from None
    with preserved_generators():
        seed_everything(derive_seed(seed, "datasets"))
        made = make(**kwargs)
    if not isinstance(made, Mapping) or not made:
        raise UserError(
            f'get_datasets_fn must return a dict such as {{"train": ds, "valid": ds}}; it returned '
            f"{kind_of(made)}"
        )
    return dict(made)


def _source_from_loader(name: str, loader: Any) -> Source:
    check_bare(f"loaders[{name!r}]", loader)
    if not isinstance(loader, DataLoader):
        raise UserError(
            f"loaders[{name!r}] is {kind_of(loader)}, which cannot be dealt out to workers; pass a "
            "torch.utils.data.DataLoader, or "
            f'datasets={{"batch_size": …, {name!r}: dataset}} with a Dataset or IterableDataset'
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UserError(
            f"loaders[{name!r}] is a {type(loader).__name__} with its own __iter__, which would be "
            "bypassed; pass a plain "
            "DataLoader with that behaviour in its collate_fn, sampler or data set"
        )
    if hasattr(loader, "set_epoch"):
        raise UserError(
            f"loaders[{name!r}] is a {type(loader).__name__} with its own set_epoch, which would "
            "never be called; give it to the data set, the sampler or the collate function, whose "
            "set_epoch is called with each epoch"
        )
    if not getattr(loader, "in_order", True):
        raise UserError(
            f"loaders[{name!r}] has in_order=False, by which batches come in the order in which "
            "they are ready; here "
            "the order is a function of the seed and the epoch: leave in_order out"
        )
    if getattr(loader, "pin_memory_device", ""):
        raise UserError(
            f"loaders[{name!r}] has pin_memory_device={loader.pin_memory_device!r}; batches are "
            "pinned for the worker's own device: write pin_memory=True alone"
        )
    options = {key: getattr(loader, key) for key in _READING}
    if not options["pin_memory"]:
        options.pop("pin_memory")  # what a DataLoader has where nothing was said
    if not options["num_workers"]:
        for key in ("prefetch_factor", "multiprocessing_context", "persistent_workers", "timeout"):
            options.pop(key)
    source = Source(name, loader.dataset, batch_size=loader.batch_size, options=options)
    if isinstance(loader.dataset, IterableDataset):
        source.drop_last = bool(loader.drop_last)
        return source
    if loader.batch_size is None and loader.batch_sampler is None:
        raise UserError(
            f"loaders[{name!r}] has batch_size=None, so that the size of a batch is unknown; give "
            "it batch_size=… and let the data set return single samples"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        source.batch_sampler = loader.batch_sampler
        _refuse_distributed_sampler(name, getattr(loader.batch_sampler, "sampler", None))
        return source
    # A BatchSampler that the user made (batch_sampler=BatchSampler(…)) is taken apart like the one
    # that DataLoader makes.
    batcher = loader.batch_sampler
    source.batch_size, source.drop_last = batcher.batch_size, bool(batcher.drop_last)
    sampler = batcher.sampler
    _refuse_distributed_sampler(name, sampler)
    if type(sampler) is RandomSampler and _is_plain_shuffle(sampler, loader.dataset):
        source.shuffle = True
    elif type(sampler) is not SequentialSampler:
        source.sampler = sampler
    return source


def _is_plain_shuffle(sampler: RandomSampler, dataset: Any) -> bool:
    return (
        not sampler.replacement
        and sampler.num_samples == len(dataset)
        and sampler.generator is None
    )


def _refuse_distributed_sampler(name: str, sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler):
        raise UserError(
            f"loader {name!r} has a DistributedSampler, which pads and repeats samples; allhands "
            "deals the samples out itself, exactly. Write DataLoader(dataset, batch_size=…, "
            f"shuffle={sampler.shuffle}) without a sampler"
        )


def _build_feed(
    source: Source,
    world: World,
    seed: int,
    accumulate: int,
    place: tuple[int, int] | None,
    level: bool,
    began_with: int | None,
) -> Feed:
    feed = _feed_of(source, world, seed, accumulate, place, level, began_with)
    feed.own_collate = source.options.get("collate_fn") not in (None, default_collate)
    feed.level = level
    return feed


def _feed_of(
    source: Source,
    world: World,
    seed: int,
    accumulate: int,
    place: tuple[int, int] | None,
    level: bool,
    began_with: int | None,
) -> Feed:
    name, dataset = source.name, source.dataset
    rank, size = place if place is not None else (world.rank, world.world_size)
    if source.batch_sampler is None:
        check_whole(f"loader {name!r} has batch_size", source.batch_size)
    deal = {
        "batch_size": source.batch_size if source.batch_sampler is None else 1,
        "world_size": size,
        "accumulate": accumulate,
        "drop_last": source.drop_last,
        "level": level,
        "began_with": began_with,
    }
    options = dict(source.options)
    if world.device.type == "cuda" and options.get("collate_fn") in (None, default_collate):
        options.setdefault("pin_memory", True)
    if isinstance(dataset, IterableDataset):
        dataset, split = taken_as(dataset)
        if split and world.world_size > 1 and size != world.world_size:
            raise UserError(
                f"loader {name!r} is split by rank, and with this strategy "
                f"{world.world_size // size} ranks compute with the same samples; let the stream "
                "give the same ones on every rank, without a nodesplitter; they are then dealt out"
            )
        kind = SplitFeed if split and world.world_size > 1 else IterableFeed
        return kind(
            name, dataset, deal, rank, world, seed, _iterable_options(source, world, options)
        )
    if len(dataset) == 0:
        raise UserError(f"the data set of loader {name!r} is empty")
    order = _order_of(source, world, seed)
    tensors = None if isinstance(order, BatchSource) else _tensors_of(dataset, options)
    if tensors is not None:
        return InMemoryFeed(name, tensors, order, deal, rank, world.device)  # type: ignore[arg-type]
    return LoaderFeed(name, dataset, order, deal, rank, seed, options, world.device)


def _order_of(source: Source, world: World, seed: int) -> OrderSource:
    if source.batch_sampler is not None:
        return BatchSource(source.name, source.batch_sampler, world, seed)
    if source.sampler is not None:
        return Sampled(source.name, source.sampler, world, seed)
    length = len(source.dataset)
    return Shuffled(length, seed) if source.shuffle else Sequential(length)


def _tensors_of(dataset: Any, options: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """The tensors of a data set that can be batched by indexing with the same result as by a
    DataLoader."""
    if options.get("worker_init_fn") is not None or options.get("collate_fn") not in (
        None,
        default_collate,
    ):
        return None
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
        rows = torch.as_tensor(dataset.indices, dtype=torch.int64)
        return tuple(tensor[rows.to(tensor.device)] for tensor in dataset.dataset.tensors)
    return None


def _iterable_options(source: Source, world: World, options: dict[str, Any]) -> dict[str, Any]:
    workers = options.get("num_workers", 0)
    if source.shuffle or source.sampler is not None:
        raise UserError(
            f"loader {source.name!r} reads an IterableDataset, which has no order to choose; "
            "remove shuffle and sampler"
        )
    if workers > 1:
        raise UserError(
            f"loader {source.name!r} reads an IterableDataset with num_workers={workers}: each "
            "loader process would read the whole stream and every sample would come several times. "
            "Write num_workers=1 (or 0), or use a map-style data set"
        )
    if world.world_size > 1:
        # In a process of its own, a stream that draws from the global generators draws alike on
        # every rank.
        options["num_workers"] = 1
    return options
