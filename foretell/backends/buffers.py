"""Memory that a runtime writes its outputs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

KEPT_BLOCKS = 16  # blocks whose memory is kept for later outputs
KEPT_BYTES = 1 << 21  # bytes that a kept block may have


class OutputBuffers:
    """Blocks (rows, width) of float32, given out again once nobody holds what was made of them.

    New memory for each forward would take time: its pages must be mapped first.
    """

    def __init__(self, wrap_memory: Callable[[np.ndarray], Any]):
        """`wrap_memory(memory)`: the object through which a runtime writes to a block."""
        self.wrap = wrap_memory
        # Memory, what the runtime knows it by, and the array that was given out last.
        self.blocks: list[tuple[np.ndarray, Any, weakref.ref[np.ndarray]]] = []

    def take_block(self, row_count: int, width: int) -> tuple[np.ndarray, Any]:
        """Takes a block and its wrapper. The block is in use as long as any tensor made of it
        lives.
        """
        unused_blocks = (
            index
            for index, (memory, _, user) in enumerate(self.blocks)
            if user() is None and memory.shape == (row_count, width)
        )
        block_index = next(unused_blocks, None)
        if block_index is not None:
            memory, wrapped, _ = self.blocks.pop(block_index)
        else:
            memory = np.empty((row_count, width), np.float32)
            wrapped = self.wrap(memory)
        view = memory.view()
        if memory.nbytes <= KEPT_BYTES:
            self.blocks = [*self.blocks[1 - KEPT_BLOCKS :], (memory, wrapped, weakref.ref(view))]
        return view, wrapped
