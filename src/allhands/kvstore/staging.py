"""Where tensors of a GPU, or of an unusual layout, lie while they travel: in memory of the CPU, and
page-locked for a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Staging:
    """Keeps one buffer a key and direction, because page-locking memory costs more than the
    copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def values(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The numbers of each tensor in order, 1-D, on the CPU: its own memory where they lie so
        already."""
        found, devices = {}, set()
        for name, tensor in given.items():
            value = tensor.detach()
            if value.device.type == "cuda":
                buffer = self._buffer(name, "up", value)
                buffer.view(value.shape).copy_(value, non_blocking=True)
                devices.add(value.device)
                found[name] = buffer
            else:
                found[name] = value.to("cpu").contiguous().view(-1)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return found

    def room(self, outs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """1-D tensors on the CPU for new values: the tensors' own memory where possible."""
        return {
            name: out.detach().view(-1)
            if out.device.type == "cpu" and out.is_contiguous()
            else self._buffer(name, "down", out)
            for name, out in outs.items()
        }

    def put(self, staged: Mapping[str, torch.Tensor], outs: Mapping[str, torch.Tensor]) -> None:
        """Copy what has come into `room` to where it belongs."""
        with torch.no_grad():
            for name, out in outs.items():
                if name in staged and staged[name].data_ptr() != out.data_ptr():
                    out.copy_(staged[name].view(out.shape))

    def _buffer(self, name: str, way: str, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((name, way))
        if buffer is None or buffer.numel() != like.numel() or buffer.dtype != like.dtype:
            buffer = torch.empty(
                like.numel(), dtype=like.dtype, pin_memory=like.device.type == "cuda"
            )
            self._buffers[name, way] = buffer
        return buffer
