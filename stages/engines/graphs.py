"""CUDA graphs, recorded while the GPU still works on what came before."""

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """Records what functions launch; the recordings share their memory, and a function may be recorded in any thread.

    Unlike `torch.cuda.graph` it does not wait for the device and keeps the allocator's cache as it is: both take longer
    than to record a step.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._known: set[Hashable] = set()
        # The shared memory is there for as long as any graph is: for good.
        self._anchor = self._recorded(lambda: torch.zeros(1, device="cuda"))

    def is_known(self, shapes: Hashable) -> bool:
        """Whether a function of these shapes was recorded before: if not, `capture` runs it once."""
        return shapes in self._known

    def capture(self, function: Callable[[], object], shapes: Hashable) -> torch.cuda.CUDAGraph:
        """A graph of what `function` launches. What is made at first, compiled code above all, is made before."""
        if shapes not in self._known:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                function()
            torch.cuda.current_stream().wait_stream(self._stream)
            self._known.add(shapes)
        return self._recorded(function)

    def _recorded(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        return graph
