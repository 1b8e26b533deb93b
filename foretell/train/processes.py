"""The processes that train one model together: one, or as many as `accelerate launch` started.

Each has the whole model and takes its share of every step's micro batches; their gradients are
added up before the step is taken. Which texts a micro batch has depends on its number and the seed
alone, and each weighs the same in its step wherever it is computed, so the weights are those of one
process but for the order of sums.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch

from foretell.errors import BadConfig
from foretell.ops.devices import check_device

COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
PATIENCE = timedelta(days=7)  # others wait for so long while the first one writes answers


def process_count() -> int:
    """How many processes `accelerate launch`, torchrun or mpirun started."""
    from accelerate.utils import get_int_from_env

    count: int = get_int_from_env(COUNTS, 1)
    return count


class Processes:
    """Processes that train together, seen from one of them, which joins the others, if any.

    `device`: where this one trains, "": its own GPU if there are several processes, else the CPU.
    Raises BadConfig.
    """

    def __init__(self, device: str = ""):
        self.count, self.index = 1, 0
        self.device = device or "cpu"
        self._on_cpu = device == "cpu"
        if process_count() > 1:
            if device not in ("", "cpu"):
                raise BadConfig(
                    f"--device {device}: each of several processes has a device of its own; leave "
                    "it out, or give cpu"
                )
            self.count, self.index = self._state.num_processes, self._state.process_index
            self.device = str(self._state.device)
        else:
            check_device(self.device)

    @cached_property
    def _state(self) -> Any:
        from accelerate import PartialState

        cpu_asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        on_cpu = self._on_cpu or cpu_asked or not torch.accelerator.is_available()
        return PartialState(cpu=on_cpu, timeout=PATIENCE)

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and says what came of it."""
        return not self.index

    def check(self, batch: int, micro: int) -> None:
        """Raises BadConfig where a step's micro batches cannot be shared equally."""
        parts = batch // micro
        if parts % self.count:
            larger_batch = -(-parts // self.count) * self.count * micro
            raise BadConfig(
                f"batch={batch}: {parts} micro batches of {micro} tokens cannot be shared by "
                f"{self.count} processes; give --batch {larger_batch}, or start as many processes "
                f"as divide {parts}"
            )

    def share(self, parts: int) -> range:
        """The numbers, of a step's micro batches, of those that this process computes."""
        return range(self.index, parts, self.count)

    def wait(self) -> None:
        """Waits until all processes have come here."""
        if self.count > 1:
            self._state.wait_for_everyone()

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process runs the block before all others do."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def total(self, value: float) -> float:
        """The sum of a number over the processes."""
        if self.count == 1:
            return value
        return float(self._sum_tensor(torch.tensor([value])))

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Makes each parameter's gradient the sum over the processes; one that has none in any of
        them stays without.
        """
        if self.count == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        gradient_counts = self._sum_tensor(
            torch.tensor([float(p.grad is not None) for p in trained])
        )
        trained = [
            p for p, is_there in zip(trained, gradient_counts.tolist(), strict=True) if is_there
        ]
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
        if not parts:
            return
        summed_parts = self._sum_tensor(torch.cat(parts)).split([p.numel() for p in trained])
        for p, part in zip(trained, summed_parts, strict=True):
            p.grad = part.view_as(p).clone()

    def _sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        from accelerate.utils import reduce

        summed: torch.Tensor = reduce(tensor.to(self.device), "sum")
        return summed
