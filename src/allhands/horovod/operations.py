"""What a rank may ask for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from allhands.errors import UserError
from allhands.horovod import objects
from allhands.horovod.handles import Handle
from allhands.horovod.operation_request import OperationRequest
from allhands.horovod.process_sets import ProcessSet, global_process_set
from allhands.horovod.reduce_ops import Adasum, Average, ReduceOp, Sum
from allhands.world import World

Tensors = Sequence[torch.Tensor]


class Operations(ABC):
    """The collective operations of an engine.

    Every operation takes a list of tensors, which travel together and are all or nothing; one
    tensor is a list of one. It returns a `Handle` at once. Tensors are torch's, on the CPU or a
    GPU, and are not to be changed before the handle's `wait` has returned.
    """

    world: World

    @abstractmethod
    def begin(
        self,
        name: str | None,
        ask: OperationRequest,
        process_set: ProcessSet,
        tensors: Tensors,
        outputs: Tensors,
        made_set: ProcessSet | None = None,
    ) -> Handle:
        """Begin what `ask` says; the operations below do it."""

    @abstractmethod
    def named(self, kind: str, name: str | None, process_set: ProcessSet) -> str:
        """`name`, or one that counts this process set's operations of the kind that have none."""

    def allreduce(
        self,
        tensors: Tensors,
        *,
        name: str | None = None,
        op: ReduceOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        outputs: Tensors | None = None,
        tensor_names: Sequence[str] = (),
    ) -> Handle:
        """Reduce each tensor over the ranks; the result is post times the reduction of pre times
        the values.

        `outputs` may be the tensors themselves; None makes new ones. `tensor_names` are for
        messages.
        """
        ask = self.ask_allreduce(
            tensors, op, prescale_factor, postscale_factor, process_set, tensor_names
        )
        made = [torch.empty_like(tensor) for tensor in tensors] if outputs is None else outputs
        return self.begin(name, ask, process_set, tensors, made)

    def ask_allreduce(
        self,
        tensors: Tensors,
        op: ReduceOp,
        pre: float,
        post: float,
        process_set: ProcessSet,
        names: Sequence[str] = (),
        absent: Sequence[int] = (),
    ) -> OperationRequest:
        """What `allreduce` asks for, to be given to `begin` again and again, with tensors like
        these or with one that holds them all, one after another. `absent` are the places of tensors
        that this rank has no value for, and gives zeros.
        """
        if op == Adasum and process_set.size() & (process_set.size() - 1):
            raise UserError(
                f"op Adasum needs a power of two of ranks, and there are {process_set.size()}; set "
                "op to hvd.Average, or train with 2, 4, 8 ... ranks"
            )
        return self._ask(
            "allreduce",
            tensors,
            names,
            absent=tuple(absent),
            op=op,
            pre=float(pre),
            post=float(post),
        )

    def allgather(
        self,
        tensors: Tensors,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """All ranks' rows of each tensor, in the order of the ranks; the first dimension may differ
        between them."""
        _need_rows("allgather", tensors)
        return self.begin(name, self._ask("allgather", tensors), process_set, tensors, [])

    def broadcast(
        self,
        tensors: Tensors,
        root_rank: int,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        outputs: Tensors | None = None,
        tensor_names: Sequence[str] = (),
    ) -> Handle:
        """Rank `root_rank`'s tensors, on all ranks. It is counted in the whole world, also in a
        process set."""
        members = process_set._members()
        if root_rank not in members:
            raise UserError(
                f"broadcast: root_rank={root_rank} is none of the ranks {members}; set root_rank "
                "to one of them"
            )
        ask = self._ask("broadcast", tensors, tensor_names, root=int(root_rank))
        made = [torch.empty_like(tensor) for tensor in tensors] if outputs is None else outputs
        return self.begin(name, ask, process_set, tensors, made)

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Any = None,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """The rows that each rank has for this one, and how many came from each (int32).

        `splits`: how many rows go to each rank, in the order of the ranks; None deals them evenly.
        """
        _need_rows("alltoall", [tensor])
        size = process_set.size()
        if splits is not None:
            given = [int(number) for number in splits]
        else:
            given = [len(tensor) // size] * size
        if len(given) != size or min(given) < 0 or sum(given) != len(tensor):
            raise UserError(
                f"alltoall: the splits {given} of {len(tensor)} rows over {size} ranks; set splits "
                f"to {size} numbers of at least 0 whose sum is {len(tensor)}"
            )
        return self.begin(
            name, self._ask("alltoall", [tensor], splits=tuple(given)), process_set, [tensor], []
        )

    def reducescatter(
        self,
        tensors: Tensors,
        *,
        name: str | None = None,
        op: ReduceOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """This rank's rows of each reduced tensor; the first ranks have one more where they do not
        divide evenly."""
        _need_rows("reducescatter", tensors)
        if op not in (Average, Sum):
            raise UserError(
                f"reducescatter: op {op} is not possible; set op to hvd.Average or hvd.Sum"
            )
        ask = self._ask(
            "reducescatter",
            tensors,
            op=op,
            pre=float(prescale_factor),
            post=float(postscale_factor),
        )
        return self.begin(name, ask, process_set, tensors, [])

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Wait until all ranks have come here."""
        self.begin(None, OperationRequest("barrier"), process_set, [], []).wait()

    def broadcast_object(
        self,
        obj: Any,
        root_rank: int = 0,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Rank `root_rank`'s object, which consists of plain values, containers, tensors and numpy
        arrays.

        Raises:
            UserError: on all ranks, when it holds something else.
        """
        name = self.named("broadcast_object", name, process_set)
        data = (
            objects.pack(obj) if self.world.rank == root_rank else torch.zeros(0, dtype=torch.uint8)
        )
        length = torch.tensor([len(data)])
        (length,) = self.broadcast(
            [length], root_rank, name=f"{name}.length", process_set=process_set
        ).wait()
        whole = (
            data if self.world.rank == root_rank else torch.zeros(int(length), dtype=torch.uint8)
        )
        (whole,) = self.broadcast(
            [whole], root_rank, name=f"{name}.data", process_set=process_set
        ).wait()
        return objects.unpack(whole)

    def allgather_object(
        self, obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[Any]:
        """Every rank's object, in the order of the ranks; see `broadcast_object`."""
        name = self.named("allgather_object", name, process_set)
        data = objects.pack(obj)
        handle = self.allgather(
            [torch.tensor([len(data)]), data], name=name, process_set=process_set
        )
        lengths, whole = handle.wait()
        return [objects.unpack(part) for part in whole.split(lengths.tolist())]

    def _ask(
        self, kind: str, tensors: Tensors, names: Sequence[str] = (), **more: Any
    ) -> OperationRequest:
        if not tensors:
            raise UserError(f"{kind}: the list of tensors is empty; give at least one tensor")
        for place, tensor in enumerate(tensors):
            label = repr(names[place]) if names else f"number {place}"
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                raise UserError(
                    f"{kind}: tensor {label} is {_kind(tensor)}, and has to be a dense torch.Tensor"
                )
            if not tensor.is_contiguous():
                raise UserError(
                    f"{kind}: tensor {label} is not contiguous; give tensor.contiguous()"
                )
        devices = {tensor.device.type for tensor in tensors}
        if len(devices) > 1 or not devices <= {"cpu", "cuda"}:
            raise UserError(
                f"{kind}: tensors of one call lie on {' and '.join(sorted(devices))}; they have to "
                "be on the CPU, or a GPU"
            )
        if "cuda" in devices and self.world.backend != "nccl" and not self.world.is_alone:
            raise UserError(
                f"{kind}: the tensors are on a GPU, and the ranks are connected by "
                f"{self.world.backend}; give tensor.cpu(), or start processes that see one GPU each"
            )
        if (
            "cuda" in devices
            and not self.world.is_alone
            and any(tensor.device != self.world.device for tensor in tensors)
        ):
            raise UserError(
                f"{kind}: a tensor is on {tensors[0].device}, and this rank's GPU is "
                f"{self.world.device}; call "
                "torch.cuda.set_device(hvd.local_rank()) before tensors are made"
            )
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        dtypes = tuple(str(tensor.dtype)[6:] for tensor in tensors)
        return OperationRequest(kind, shapes, dtypes, tuple(names), device=devices.pop(), **more)


def _need_rows(kind: str, tensors: Tensors) -> None:
    for tensor in tensors:
        if not tensor.dim():
            raise UserError(
                f"{kind}: a tensor without dimensions has no rows; give tensor.reshape(1)"
            )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of layout {value.layout}"
    return f"a {type(value).__name__}"
