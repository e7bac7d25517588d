"""A call in a process of its own: a worker of a world cannot plan in its own one."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Bytes of a call; a larger one holds data that somebody else would have to copy.
_LARGEST = 64 * 2**20
_GENTLY = "gently"


class OwnProcess:
    """A call of a function in a process that is in no world and sees no GPU.

    Args:
        function, args: as they can be pickled, those of a script among them. Parameters arrive
            on the meta device, and other tensors of a GPU on the processor.
        gently: at the lowest priority, beside a training.

    Raises:
        ValueError: the call takes more than 64 MiB.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, gently: bool = False) -> None:
        world = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "ALLHANDS_", "TORCHELASTIC_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(world)}
        # Open as long as the process runs.
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as call:
            call.write(_pickled((function, args)))
            call.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "allhands.planning.own_process", *[_GENTLY] * gently],
                stdin=call,
                stdout=self._out,
                stderr=subprocess.DEVNULL,
                env=kept | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
            )

    @property
    def runs(self) -> bool:
        """Whether there is no answer yet."""
        return self._process.poll() is None

    def answer(self, seconds: float) -> Any:
        """What the function gives; the process is ended.

        Args:
            seconds: how long to wait.

        Raises:
            subprocess.SubprocessError: it has failed, or takes longer.
        """
        try:
            code = self._process.wait(seconds)
            if code:
                raise subprocess.CalledProcessError(code, self._process.args)
            self._out.seek(0)
            return pickle.load(self._out)
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._out.close()


class _BoundedBytes(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _LARGEST:
            raise ValueError(f"the call takes more than {_LARGEST >> 20} MiB")
        return super().write(data)


def _pickled(value: Any) -> bytes:
    import cloudpickle

    class CallPickler(cloudpickle.Pickler):
        def reducer_override(self, one: Any) -> Any:
            if isinstance(one, nn.Parameter):
                return _parameter, (one.shape, one.stride(), one.dtype, one.requires_grad)
            if isinstance(one, torch.Tensor) and one.device.type == "cuda":
                return torch.clone, (one.detach().cpu(),)
            return super().reducer_override(one)

    out = _BoundedBytes()
    CallPickler(out).dump(value)
    return out.getvalue()


def _parameter(shape: Any, stride: Any, dtype: torch.dtype, trained: bool) -> nn.Parameter:
    empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=trained)


def _answer() -> None:
    if _GENTLY in sys.argv:
        os.nice(19)
        torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints is no answer
    function, args = pickle.load(sys.stdin.buffer)
    pickle.dump(function(*args), out)
    out.close()


if __name__ == "__main__":
    _answer()
