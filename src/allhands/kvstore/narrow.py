"""`Narrow`: gradients and weights in fewer bits, in a store without servers.

Keys are cut as one server cuts them, and each piece has a worker that is its server: it decodes and
adds up what all workers push, and encodes what the step has changed. So the numbers are those of a
job with one server, also where a codec looks at a whole piece (1bit, topk).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allhands.comm.codecs import NO_CODEC, codec_from
from allhands.errors import UserError
from allhands.kvstore.bucket import KeyBucket
from allhands.kvstore.chunk_compression import (
    ChunkCompressor,
    check_finite,
    compressible,
    take_values,
)
from allhands.kvstore.placement import KeyPiece, place

# Sends the n-th tensor to rank n; returns what each rank sent here. Only the first dimension may
# differ.
Swap = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class Narrow:
    """What compression needs to know between two rounds.

    Args:
        push, pull: options of the codecs, of the gradients and of the way back.
        rank, workers: who takes part.
    """

    def __init__(
        self, push: Mapping[str, Any], pull: Mapping[str, Any], rank: int, workers: int
    ) -> None:
        self._up_codec, self._down_codec = codec_from(push), codec_from(pull)
        self.keeps, self.narrows_values = push != NO_CODEC, pull != NO_CODEC
        self._rank, self._workers = rank, workers
        self._pieces: dict[str, list[KeyPiece]] = {}
        self._loads = [0] * workers
        self._up: dict[str, list[ChunkCompressor]] = {}
        self._down: dict[tuple[str, int], ChunkCompressor] = {}

    def layout(self, values: Mapping[str, torch.Tensor]) -> dict[str, list[KeyPiece]] | None:
        """Where the pieces of these keys lie; None where they are not compressed. A key stays where
        it was put first."""
        if not all(compressible(value.dtype) for value in values.values()):
            return None
        for name in sorted(values):
            if name not in self._pieces:
                size = values[name].element_size()
                pieces = []
                for one in place({name: (values[name].numel(), size)}, [0])[name]:
                    owner = self._loads.index(min(self._loads))
                    self._loads[owner] += size * (one.stop - one.start)
                    pieces.append(KeyPiece(one.number, owner, one.start, one.stop))
                self._pieces[name] = pieces
        return {name: self._pieces[name] for name in sorted(values)}

    def check(self, values: Mapping[str, torch.Tensor]) -> None:
        """Raise `UserError` for a number that cannot be compressed, before any residual has
        changed."""
        for name, value in values.items():
            if value.layout == torch.strided and compressible(value.dtype):
                check_finite(name, value)

    # ------------------------------------------------------------------ a round

    def added_up(self, bucket: KeyBucket, values: torch.Tensor, swap: Swap) -> torch.Tensor:
        """This rank's part of the sum over the workers of what they push, each in fewer bits; all
        ranks call it."""
        sent: list[list[torch.Tensor]] = [[] for _ in range(self._workers)]
        flat = values.to("cpu")
        for name, offset, piece in bucket.pieces():
            data = self._compressor(name, piece.number).compress(
                flat[offset + piece.start : offset + piece.stop], name
            )
            sent[piece.server].append(data)
        total = torch.empty(len(bucket.part), dtype=values.dtype)
        counts = [piece.stop - piece.start for _, _, piece in bucket.pieces(self._rank)]
        for rank, received in enumerate(swap([_join(one) for one in sent])):
            data = received.split([self._up_codec.nbytes(count) for count in counts])
            for one, target in zip(data, total.split(counts), strict=True):
                decoded = torch.empty(len(target))
                self._up_codec.decode(one, decoded)
                if rank == 0:
                    target.copy_(decoded)
                else:
                    target.add_(decoded.to(target.dtype))
        return total.to(bucket.part.device)

    def _compressor(self, name: str, number: int) -> ChunkCompressor:
        if name not in self._up:
            self._up[name] = [
                ChunkCompressor(self._up_codec, piece.stop - piece.start)
                for piece in self._pieces[name]
            ]
        return self._up[name][number]

    def spread(self, bucket: KeyBucket, part: torch.Tensor, changes: bool, swap: Swap) -> None:
        """Bring `bucket.whole` nearer to the parts of all ranks, in fewer bits; all ranks call it.

        Args:
            bucket: its `whole` is what all workers have.
            part: the true values of this rank's part.
            changes: send by how much values have changed, as with an optimizer. Else the values
                themselves are sent, and what is lost of them is added to the next.
        """
        mine = bucket.pieces(self._rank)
        counts = [piece.stop - piece.start for _, _, piece in mine]
        new, had = part.to("cpu").split(counts), bucket.own(bucket.whole).to("cpu").split(counts)
        encoded, failed = [_OK], ""
        for (name, _, piece), value, before in zip(mine, new, had, strict=True):
            compressor = self._down.setdefault(
                (name, piece.number), ChunkCompressor(self._down_codec, len(value))
            )
            try:
                encoded.append(compressor.values(value, before, changes, name))
            except UserError as error:
                failed = str(error)
                break
        # After a first byte of 1 come the words of an error, which all ranks raise.
        if failed:
            body = torch.frombuffer(bytearray(b"\x01" + failed.encode()), dtype=torch.uint8)
        else:
            body = torch.cat(encoded)
        received = swap([body] * self._workers)
        for rank, data in enumerate(received):
            if data[0]:
                raise UserError(f"on worker {rank}: {bytes(data[1:].tolist()).decode()}")
        for rank, data in enumerate(received):
            begin = 1
            for _, offset, piece in bucket.pieces(rank):
                target = bucket.whole[offset + piece.start : offset + piece.stop]
                size = self._down_codec.nbytes(len(target))
                piece_data = data[begin : begin + size].clone()
                take_values(self._down_codec, piece_data, target, changes)
                begin += size

    # ------------------------------------------------------------------ what is left over

    def residuals(self) -> dict[str, torch.Tensor]:
        """What the pushes have left over on this worker: by key, float32, 1-D."""
        return (
            {name: torch.cat([one.state() for one in each]) for name, each in self._up.items()}
            if self.keeps
            else {}
        )

    def load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `residuals` gave."""
        for name, values in residuals.items():
            for piece in self._pieces[name]:
                self._compressor(name, piece.number).load(
                    values.reshape(-1)[piece.start : piece.stop]
                )

    def forget_values(self) -> None:
        """All workers have got the values whole: nothing of the way back is left over."""
        self._down.clear()


_OK = torch.zeros(1, dtype=torch.uint8)


def _join(data: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(data)) if data else torch.empty(0, dtype=torch.uint8)
