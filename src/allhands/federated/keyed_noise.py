"""Dropout, crops and flips that are a function of (seed, round, client, step, layer, position) and
of nothing else.

A generator's numbers depend on the order in which they are asked for, and a GPU's generator on the
size of its blocks. A number that is a hash of its place is the same whether clients are trained one
by one, in a CUDA graph or stacked, on any device (counter-based random numbers: Salmon et al.,
Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from allhands.data import derive_seed
from allhands.errors import UserError
from allhands.models.augment import PerImage, RandomCrop, RandomFlip
from allhands.split_mix import STEP, mixed_array

# Odd multipliers with good avalanche: the golden ratio, and two of murmur3's finalizer, as signed
# 32-bit numbers.
_SPREAD, _MIX, _LAST = (n - 2**32 for n in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
#: Numbers of dropout that are made at once for further steps, by kind of device: on a GPU asking
#: for the ten operations takes longer than their work, on a processor it does not.
MOST_AHEAD = {"cuda": 1 << 22}


def hashed(count: int, key: torch.Tensor) -> torch.Tensor:
    """Random bits for the places 0 to `count` - 1, int32, the same on every device.

    Args:
        count: how many.
        key: int32, shape ``[]``, for bits of shape ``[count]``; ``[clients, 1]`` for ``[clients,
            count]``.
    """
    return _mix(_spread(count, key.device), key)


def _spread(count: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(count, dtype=torch.int32, device=device) * _SPREAD
    return places ^ (places >> 16)


def _mix(places: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    # C++ may take it that signed products do not overflow, and then x * 3 < 0 is x < 0.
    if torch.compiler.is_compiling():
        bits = ((places ^ key).long() * _MIX).int()
        return ((bits ^ (bits >> 15)).long() * _LAST).int()
    bits = (places ^ key).mul_(_MIX)  # in place, for what is read again is in the cache then
    return bits.bitwise_xor_(bits >> 15).mul_(_LAST)


class Keyed(nn.Module):
    """Stands in for a layer that draws while its model is trained by an executor."""

    #: Hash of (seed, round, client, step, layer): int32, shape ``[]``; under `vmap` one a client.
    key: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key", torch.zeros((), dtype=torch.int32), persistent=False)
        self.calls, self.over = 0, False
        #: The keys of all steps that come, shape ``[steps]``, and which of them is the present
        #: one, where they are known.
        self.keys: torch.Tensor | None = None
        self.step = 0
        self._places: dict[int, torch.Tensor] = {}

    def _bits(self, count: int, device: torch.device) -> torch.Tensor:
        """Random bits for the places 0 to `count` - 1 of this call: int32, shape ``[count]``."""
        # A layer that a forward pass calls twice needs two draws. Checkpointed activations are
        # computed again in the backward pass, where the number of the call is only known if there
        # is no other.
        if self.over and self.calls != 1:
            raise UserError(
                "a layer of dropout, crops or flips that the model calls several times runs again "
                "in the backward pass (activation checkpointing); give each call a layer of its own"
            )
        call = 0 if self.over else self.calls
        if not self.over:
            self.calls += 1
        places = self._spread(count, device)
        return _mix(places, (self.key.long() + call * _SPREAD).int() if call else self.key)

    def _spread(self, count: int, device: torch.device) -> torch.Tensor:
        # Kept, never replaced: a recorded step reads them where they lie.
        places = self._places.get(count)
        if places is None or places.device != device:
            places = self._places[count] = _spread(count, device)
        return places


class KeyedDropout(Keyed):
    """Stands in for a dropout layer.

    Args:
        p: the probability that a number becomes 0; the others are divided by 1 - p. Kept to within
            2**-32.
        features: leading dimensions, the batch included, that have numbers of their own; what lies
            behind them is dropped together (`nn.Dropout2d`: 2). None: every number on its own.
        inplace: change the input, as the layer did for which it stands.
    """

    def __init__(self, p: float, features: int | None, inplace: bool) -> None:
        super().__init__()
        self.p, self.features, self.inplace = p, features, inplace
        #: Masks of steps from `_first` on.
        self._ahead: tuple[torch.Tensor, ...] | None = None
        self._first = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return x
        kept = self._kept(x)
        return x.mul_(kept) if self.inplace else x * kept

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        """0 where a number is dropped and 1 / (1 - p) elsewhere, in a shape that multiplies with
        `x`."""
        shape = x.shape if self.features is None else x.shape[: self.features]
        if self.p == 1.0:
            return x.new_zeros(()).expand(x.shape)
        kept = self._made_ahead(shape, x)
        if kept is None:
            kept = self._scaled(self._bits(shape.numel(), x.device), x.dtype).view(shape)
        behind = x.dim() - len(shape)
        return kept.view(*shape, *(1,) * behind) if behind else kept

    def _made_ahead(self, shape: torch.Size, x: torch.Tensor) -> torch.Tensor | None:
        """What the first call of the present step keeps, out of what was made for steps that come;
        None where each step makes its own."""
        keys, made = self.keys, self._ahead
        if keys is None or self.calls or self.over or not shape:
            return None
        place = self.step - self._first
        if (
            made is None
            or not 0 <= place < len(made)
            or made[0].shape[1:] != shape[1:]
            or len(made[0]) < shape[0]
            or made[0].dtype != x.dtype
        ):
            count = MOST_AHEAD.get(x.device.type, 0) // max(1, shape.numel())
            if count < 2:
                return None
            coming = keys[self.step : self.step + count]
            bits = _mix(self._spread(shape.numel(), x.device), coming[:, None])
            made, place = self._scaled(bits, x.dtype).view(len(coming), *shape).unbind(), 0
            # Past `Module.__setattr__`, which takes longer than a small operation.
            self.__dict__.update(_ahead=made, _first=self.step)
        self.__dict__["calls"] = 1
        kept = made[place]
        return kept if len(kept) == shape[0] else kept[: shape[0]]

    def _scaled(self, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kept = bits >= min(round(self.p * 2**32) - 2**31, 2**31 - 1)
        scale = 1.0 / (1.0 - self.p)
        # One operation where it gives this format by itself.
        return kept * scale if dtype == torch.get_default_dtype() else kept.to(dtype).mul_(scale)


class KeyedImages(Keyed):
    """Stands in for a layer that changes each image of a batch by numbers of its own."""

    def __init__(self, layer: PerImage) -> None:
        super().__init__()
        self.numbers, self.change = layer.numbers, layer.change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        drawn = self._bits(len(x) * self.numbers, x.device).long() + 2**31
        return self.change(x, drawn.view(len(x), self.numbers))


# Layers with masks of their own kind (AlphaDropout) keep the global generator.
_FEATURES: dict[type[nn.Module], int | None] = {
    nn.Dropout: None,
    nn.Dropout1d: 2,
    nn.Dropout2d: 2,
    nn.Dropout3d: 2,
}
_IMAGES = (RandomCrop, RandomFlip)


def _keyed(module: nn.Module) -> Keyed | None:
    """What stands in for a layer; None for one that keeps to the generator."""
    if type(module) in _FEATURES:
        return KeyedDropout(module.p, _FEATURES[type(module)], module.inplace)  # type: ignore[arg-type]
    return KeyedImages(module) if isinstance(module, PerImage) and type(module) in _IMAGES else None


class KeyedNoise:
    """The layers of a model that draw, replaced by ones with keys.

    Args:
        model: changed in place: its `nn.Dropout`, `Dropout1d`, `Dropout2d` and `Dropout3d`, and
            `RandomCrop` and `RandomFlip` of `allhands.models`, not classes derived from them.
        device: where the keys lie.

    Attributes:
        names: of the replaced layers.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.layers: dict[str, Keyed] = {}
        made: dict[int, Keyed] = {}
        for name, module in list(model.named_modules(remove_duplicate=False)):
            standing = made.get(id(module)) or _keyed(module)
            if standing is not None:
                made[id(module)] = standing.train(module.training)
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, made[id(module)])
        for name, module in model.named_modules():
            if isinstance(module, Keyed):
                self.layers[name] = module.to(device)
        self.names = list(self.layers)

    def keys(self, seed: int, round_: int, client: int, steps: int) -> torch.Tensor:
        """The keys of a client's steps: int32, shape ``[steps, layers]``, on the processor."""
        return self.keys_of(seed, round_, [client], steps)[0]

    def keys_of(self, seed: int, round_: int, clients: Sequence[int], steps: int) -> torch.Tensor:
        """The keys of several clients' steps: int32, shape ``[clients, steps, layers]``, on the
        processor."""
        layers = len(self.names)
        if not layers:
            return torch.zeros(len(clients), steps, 0, dtype=torch.int32)
        firsts = np.array(
            [derive_seed(seed, "dropout", round_, client) for client in clients], dtype=np.uint64
        )
        counted = np.arange(1, steps * layers + 1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            places = firsts[:, None] + counted * np.uint64(STEP)
        return torch.from_numpy(
            (mixed_array(places, whole=False) >> np.uint64(32))
            .astype(np.uint32)
            .view(np.int32)
            .reshape(len(clients), steps, layers)
        )

    def set(self, keys: torch.Tensor) -> None:
        """Use these keys, shape ``[layers]``, from now on; they may change in place."""
        for place, layer in enumerate(self.layers.values()):
            # Past `Module.__setattr__`, which takes longer than a small operation.
            layer.__dict__["keys"] = None
            layer._buffers["key"] = keys[place]

    def set_steps(self, keys: torch.Tensor) -> None:
        """Steps with these keys come, shape ``[steps, layers]``, which stay as they are."""
        for layer, column in zip(self.layers.values(), keys.t().contiguous(), strict=True):
            layer.__dict__.update(keys=column, _ahead=None)

    def set_step(self, step: int) -> None:
        """Use the keys of this step, of those that were set."""
        for layer in self.layers.values():
            assert layer.keys is not None
            layer.__dict__["step"] = step
            layer._buffers["key"] = layer.keys[step]

    def begin(self) -> None:
        """A forward pass begins."""
        for layer in self.layers.values():
            layer.__dict__.update(calls=0, over=False)

    def end(self) -> None:
        """The forward pass is over; what runs now belongs to the backward pass."""
        for layer in self.layers.values():
            layer.__dict__["over"] = True
