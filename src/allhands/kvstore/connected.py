"""The keys, settings and state of a store with servers, and the loss of a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import save

from allhands.comm.codecs import NO_CODEC, codec_from
from allhands.kvstore.chunk_compression import ChunkCompressor
from allhands.kvstore.comeback import come_back, join
from allhands.kvstore.optimizers import OptimizerSpec
from allhands.kvstore.placement import KeyPiece, dtype_name
from allhands.kvstore.server_link import LAST
from allhands.kvstore.server_states import put_together, take_apart
from allhands.kvstore.store_links import StoreLinks
from allhands.kvstore.store_state import StoreState
from allhands.kvstore.values import RowSparse
from allhands.kvstore.wait_state import ServerLostError
from allhands.kvstore.waits import Need, report
from allhands.kvstore.wire_frames import Kind, pack


class Connected(StoreLinks):
    """A store's calls to all of its servers; what `ServedStore` stands on."""

    # ------------------------------------------------------------------ keys

    def declare(
        self,
        named: Mapping[str, torch.Tensor | RowSparse],
        complete: bool = False,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        groups = groups or {}
        forms: dict[str, dict[str, Any]] = {}
        for name, value in named.items():
            form: dict[str, Any]
            if isinstance(value, RowSparse):
                form = {"rows": value.rows, "columns": value.columns}
                form |= {"std": value.std, "seed": value.seed}
            else:
                form = {"shape": list(value.shape), "count": value.numel()}
            dtype = dtype_name(name, value.dtype)
            forms[name] = {**form, "dtype": dtype, "group": groups.get(name, 0)}
        placed = self.links[0].ask("declare", keys=forms, complete=complete)["placed"]
        dense = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        for name, value in named.items():
            self._pieces[name] = [KeyPiece(*piece) for piece in placed[name]]
            if isinstance(value, RowSparse):
                self.tables[name] = value
            else:
                self.shapes[name] = (value.shape, value.dtype)
        if complete:
            self._complete = sorted(dense)
        # Also when worker 0 comes again: it may have been lost before; servers keep values that
        # they have.
        given = dense if self.rank == 0 else {}
        flat = {
            name: value.detach().to("cpu").contiguous().view(-1) for name, value in given.items()
        }
        for link in self.links:
            here = self.pieces_on(link, named)
            parts = []
            for name, piece in here:
                value, form = named[name], forms[name]
                part = [piece.number, name, form["group"], form["dtype"]]
                if isinstance(value, RowSparse):
                    part += [value.rows, value.columns, value.std, value.seed]
                else:
                    part += [piece.start, piece.stop, complete]
                parts.append(part)
            told = link.ask("create", forms=parts)["versions"]
            # Of rows this worker has read none yet: it counts its own pushes.
            link.versions |= {
                piece.number: 0 if name in self.tables else told[str(piece.number)]
                for name, piece in here
            }
            for name, piece in here:
                if name in flat:
                    values = flat[name][piece.start : piece.stop].clone()
                    link.put(pack(Kind.INIT, chunk=piece.number, nbytes=values.nbytes), values)
        self._share(
            self.links, [(name, one) for name in dense for one in self._pieces[name]], buffers=True
        )
        for link in self.links:
            numbers = [one.number for _, one in self.pieces_on(link, dense)]
            link.answer(
                link.begin("ready", chunks=numbers),
                "init: the first values, which worker 0 gives",
                lambda: report(self, [("init", name, 1) for name in dense]),
            )
        if self._again:
            join(self, list(named))

    # ------------------------------------------------------------------ settings, meeting, state

    def _set_optimizer(self, spec: OptimizerSpec) -> None:
        for link in self.links:
            link.ask("optimizer", name=spec.name, groups=list(spec.groups))
            link.adds = True

    def _set_compression(self, push: dict[str, Any], pull: dict[str, Any]) -> None:
        codec, down = codec_from(push), codec_from(pull)
        for link in self.links:
            link.ask("compression", push=push, pull=pull)
            link.down_codec = None if pull == NO_CODEC else down
            link.adds = self.optimizer is not None
        self._codec = None if push == NO_CODEC else codec
        self._compressors.clear()

    def barrier(self) -> None:
        self._usable()
        self._again_if_lost(self._settle)
        self._barriers += 1
        # One that came again has not counted with the others.
        number = 0 if self._again else self._barriers
        self._again_if_lost(lambda: self._wait_for_all(number))

    def _wait_for_all(self, number: int) -> None:
        """Wait until all workers have come to this barrier; 0: to any, on one that came again."""
        needs: list[Need] = [("barrier", "", number)] if number else []
        self.links[0].answer(
            self.links[0].begin("barrier", number=number), "barrier", lambda: report(self, needs)
        )

    def _settle(self) -> None:
        """Wait until the servers have taken all that this worker has sent."""
        asked = [(link, link.begin("settled", priority=LAST)) for link in self.links]
        for link, pending in asked:
            link.answer(pending, "settled")

    def state(self) -> StoreState:
        self._usable()
        found: StoreState = self._again_if_lost(self._state_once)
        return found

    def _state_once(self) -> StoreState:
        self._settle()
        found: dict[str, torch.Tensor] = {}
        for link in self.links:
            found |= {f"{link.number}\t{name}": one for name, one in link.ask("state").items()}
        return put_together(found, self._steps_before + self._version(), self._pieces, self.shapes)

    def load_state(self, state: StoreState) -> None:
        self.barrier()  # nobody's push is to come after it
        self._barriers += 1
        number = 0 if self._again else self._barriers

        def load() -> None:
            if self.rank == 0:
                self._give_state(state)
            self._wait_for_all(number)

        self._again_if_lost(load)  # all of it: a server may have gone back to the time before
        self._steps_before = state.step - self._version()

    def _give_state(self, state: StoreState) -> None:
        for link, part in zip(
            self.links, take_apart(state, self._pieces, self.tables, len(self.links)), strict=True
        ):
            number, pending = link.expect()
            data = save(part)
            link.put(pack(Kind.STATE, meta=number, nbytes=len(data)) + data)
            link.answer(pending, "load_state")

    def residuals(self) -> dict[str, torch.Tensor]:
        found = {}
        for name in self.shapes:
            pieces = self._pieces[name]
            parts = [
                self._compressors[one.number].state()
                for one in pieces
                if one.number in self._compressors
            ]
            if len(parts) == len(pieces) and parts:
                found[name] = torch.cat(parts)
        return found

    def _compresses(self) -> bool:
        return self._codec is not None

    def _load_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        assert self._codec is not None
        for name, values in residuals.items():
            for piece in self._pieces[name]:
                compressor = self._compressors.setdefault(
                    piece.number, ChunkCompressor(self._codec, piece.stop - piece.start)
                )
                compressor.load(values.reshape(-1)[piece.start : piece.stop])

    # ------------------------------------------------------------------ a server that was lost

    def _come_back(self) -> int | None:
        """Wait for a server that was lost; the step that all went back to, or None where nothing is
        lost."""
        before = self._version()
        step = come_back(self)
        if step is None:
            if self.rank == 0:
                print(
                    "allhands: a server was lost and has come back with all that it had; no step "
                    "is lost",
                    flush=True,
                )
            self._send_unread()
            return None
        self._kept.clear()
        if self.rank == 0:
            print(
                f"allhands: a server was lost and has come back; all go on from step {step}, of "
                f"which there is a snapshot: {before - step} finished steps are lost",
                flush=True,
            )
        return step

    def _send_unread(self) -> None:
        """Send again what was pushed and not read."""

    def _again_if_lost(self, work: Callable[[], Any]) -> Any:
        while True:
            try:
                return work()
            except ServerLostError:
                self._come_back()
