"""Work that is recorded once in a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GraphCapture:
    """Records functions that read and write the same memory at every call. All its graphs share one
    pool of memory, for which none may leave a result in memory that it has allocated itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """A function that replays what `function`, called twice and then recorded, asks the device
        to do."""
        before = torch.cuda.current_stream(self.device)
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(before)
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(aside):
            function()  # libraries set themselves up in the first call
            # What waits for the device cannot be recorded; to fail here leaves CUDA as it was, to
            # fail while recording does not.
            torch.cuda.set_sync_debug_mode("error")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        before.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph.replay
