"""Tiny Shakespeare: 1.1 million characters of plays, for a language model that predicts the next
character."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from allhands.data.catalogue.entry import Entry, LoadOptions, check_size, find_folder, need_file
from allhands.errors import UserError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

_BLOCK = LoadOptions.block
_BYTES = 1_115_394
_TRAIN_BYTES = _BYTES * 9 // 10  # the first 90 % of the text; the rest, later scenes, is held out
# char-rnn calls the file input.txt, a name too common to look for in the root itself.
_FILES = (
    "tinyshakespeare.txt",
    "tinyshakespeare/input.txt",
    "tinyshakespeare/tinyshakespeare.txt",
    "shakespeare/input.txt",
    "shakespeare/tinyshakespeare.txt",
)
VOCABULARY = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The 65 characters of the text; a token is the place of its character here."""


def _read(options: LoadOptions, entry: Entry) -> TensorDataset:
    import torch
    from torch.utils.data import TensorDataset

    path = need_file(find_folder(options.root, [""], _FILES, entry), _FILES, entry)
    check_size(path, _BYTES, "the text of char-rnn")
    table = np.full(256, 255, np.uint8)
    table[np.frombuffer(VOCABULARY.encode(), np.uint8)] = np.arange(len(VOCABULARY))
    tokens = table[np.fromfile(path, np.uint8)]
    if tokens.max() >= len(VOCABULARY):
        place = int(tokens.argmax())
        raise UserError(
            f"{path}: byte {place} is no character of the text; get it again from {entry.source}."
        )
    tokens = tokens[:_TRAIN_BYTES] if options.split == "train" else tokens[_TRAIN_BYTES:]
    blocks = (len(tokens) - 1) // options.block
    if blocks < 1:
        raise UserError(
            f"block={options.block} must be at most {len(tokens) - 1}, the length of the "
            f"{options.split} part."
        )
    blocks = blocks if options.limit is None else min(blocks, options.limit)
    text = torch.from_numpy(tokens.astype(np.int64))
    size = blocks * options.block
    return TensorDataset(
        text[:size].view(blocks, options.block).clone(),
        text[1 : size + 1].view(blocks, options.block).clone(),
    )


def in_blocks(block: int = _BLOCK) -> Entry:
    """What is known of the text, cut into samples of `block` characters."""
    valid = (_BYTES - _TRAIN_BYTES - 1) // block
    return Entry(
        name="shakespeare",
        num_classes=len(VOCABULARY),
        input_shape=(block,),
        sizes={"train": (_TRAIN_BYTES - 1) // block, "valid": valid, "test": valid},
        source="A. Karpathy, char-rnn, at github.com/karpathy/char-rnn "
        "(data/tinyshakespeare/input.txt)",
        reader=_read,
        classes=tuple(VOCABULARY),
        options=("block",),
    )


SHAKESPEARE = in_blocks()
