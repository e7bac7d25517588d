"""How torch.distributed.checkpoint writes tensors of which each rank holds some blocks, and reads
only the blocks of one rank.

The files are those of whole tensors: the index lists each tensor with its full size, in as many
chunks as were written.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from allhands.loop.checkpoint.storage import Reader
from allhands.strategies.held import Held


class SavePieces(dcp.DefaultSavePlanner):
    """Writes whole tensors as PyTorch's planner does, and of each `Held` this rank's blocks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        everything = self.state_dict
        self.blocks: dict[tuple[str, torch.Size], torch.Tensor] = {}
        items = []
        for key, value in everything.items():
            if not isinstance(value, Held):
                continue
            assert value.local is not None
            for piece in value.pieces:
                block, offsets = piece.of_local(value.local), torch.Size(piece.offsets)
                self.blocks[key, offsets] = block
                chunk = ChunkStorageMetadata(offsets, torch.Size(piece.sizes))
                data = TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(block), torch.Size(value.shape)
                )
                items.append(
                    WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)
                )
        self.state_dict = {
            key: value for key, value in everything.items() if not isinstance(value, Held)
        }
        self.plan: SavePlan = super().create_local_plan()
        self.plan.items.extend(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        assert index.offset is not None
        block = self.blocks.get((index.fqn, index.offset))
        return super().lookup_object(index) if block is None else block


class _LoadPieces(LoadPlanner):
    """Reads into each `Held` the blocks that it holds."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.wanted: dict[str, Held] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, kept in self.wanted.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                for piece in kept.pieces
            ]
            items += create_read_items_for_chunk_list(key, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise TypeError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        kept, number = self.wanted[read_item.dest_index.fqn], read_item.dest_index.index
        assert kept.local is not None
        assert number is not None
        block = kept.pieces[number].of_local(kept.local)
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            block = block.narrow(dim, start, length)
        return block

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def read_pieces(folder: Path, wanted: Mapping[str, Held]) -> None:
    """Fill the local tensors, which lie in the processor's memory and have the dtype of the stored
    ones."""
    with warnings.catch_warnings():
        # Each rank reads by itself.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(wanted), storage_reader=Reader(folder), planner=_LoadPieces(), no_dist=True)
