"""Options of commands that can run on a Ray cluster, and how they do it."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli._loading import load_model
from foretell.cli._options import ExecutorOptions, ModelOptions
from foretell.cli._output import message, messages
from foretell.errors import BadConfig
from foretell.fetching import resolve

if TYPE_CHECKING:
    from foretell.batch.running import Limits
    from foretell.serve.served import Served
    from foretell.serve.settings import Settings


@dataclass(frozen=True)
class ClusterOptions:
    """Whether the model runs in processes of a Ray cluster, and in how many."""

    ray: Annotated[
        bool,
        typer.Option("--ray", help="Run the model in several processes, on a Ray cluster."),
    ] = False
    ray_address: Annotated[
        str | None,
        typer.Option(help="A cluster that is there. Without it, one on this machine for now."),
    ] = None
    workers: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX", help="Processes with the model; a server may grow with its load."
        ),
    ] = "1"
    worker_cpus: Annotated[
        float, typer.Option(min=0, help="Of the cluster's CPUs, what one of them takes.")
    ] = 1.0
    worker_gpus: Annotated[
        float, typer.Option(min=0, help="Of the cluster's GPUs, what one of them takes.")
    ] = 0.0

    def counts(self) -> tuple[int, int]:
        """The fewest and the most workers. Raises BadConfig, also for options without --ray."""
        for field in dataclasses.fields(self):
            option = f"--{field.name.replace('_', '-')}"
            if not self.ray and getattr(self, field.name) != field.default:
                raise BadConfig(f"{option} is for clusters; add --ray")
        least, colon, most = self.workers.partition(":")
        try:
            numbers = int(least), int(most if colon else least)
        except ValueError:
            numbers = 0, 0
        if not 1 <= numbers[0] <= numbers[1]:
            raise BadConfig(f"--workers {self.workers}: must be a number, or two as in 1:4")
        return numbers


def travelling(models: ModelOptions) -> ModelOptions:
    """The same models for other processes, whose working directory is another one. A known name is
    fetched here, before they all do it.
    """

    def absolute(name: str) -> str:
        resolve(name)
        return str(Path(name).resolve()) if Path(name).exists() else name

    draft = None if models.draft is None else absolute(models.draft)
    return dataclasses.replace(models, model=absolute(models.model), draft=draft)
