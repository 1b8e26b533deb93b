"""Options of commands that can run on a Ray cluster, and how they do it."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretell.cli._loading import load_model
from foretell.cli._options import BackendOptions, ModelOptions
from foretell.cli._output import message, messages
from foretell.errors import BadConfig
from foretell.loading.fetch import resolve
from foretell.progress import show_working

if TYPE_CHECKING:
    from foretell.batch.running import Limits
    from foretell.serve.served import Served
    from foretell.serve.settings import Settings


@dataclass(frozen=True)
class ClusterOptions:
    """Whether the model runs in processes of a Ray cluster, and in how many."""

    ray: Annotated[
        bool, typer.Option("--ray", help="Run the model in several processes, on a Ray cluster.")
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
        min_text, colon, max_text = self.workers.partition(":")
        try:
            numbers = int(min_text), int(max_text if colon else min_text)
        except ValueError:
            numbers = 0, 0
        if not 1 <= numbers[0] <= numbers[1]:
            raise BadConfig(f"--workers {self.workers}: must be a number, or two as in 1:4")
        return numbers


def portable_options(models: ModelOptions) -> ModelOptions:
    """Options for other processes, whose working directory is another one. A known name is fetched
    here, before they all do it.
    """

    def absolute(name: str) -> str:
        resolve(name)
        return str(Path(name).resolve()) if Path(name).exists() else name

    draft = None if models.draft is None else absolute(models.draft)
    vocab_file = None if models.draft_vocab is None else str(Path(models.draft_vocab).resolve())
    named_models = [f"{name}={absolute(model)}" for name, model in models.named_models.items()]
    return dataclasses.replace(
        models,
        model=absolute(models.model),
        draft=draft,
        draft_vocab=vocab_file,
        named=named_models,
    )


# --- batches


@contextmanager
def batch_workers(
    models: ModelOptions,
    backends: BackendOptions,
    options: ClusterOptions,
    method: str,
    limits: Limits,
) -> Iterator[tuple[str, Any]]:
    """Workers of a batch: the digest of what their results depend on, and what does the work."""
    min_workers, max_workers = options.counts()
    if min_workers != max_workers:
        raise BadConfig(f"--workers {options.workers}: a batch has one number of workers")
    from foretell.cluster.cluster import check_installed, ray_cluster

    check_installed()
    make_worker = partial(batch_worker, portable_options(models), backends, models.model, limits)
    with ray_cluster(options.ray_address):
        from foretell.batch.progress import Meter, show_meter
        from foretell.cluster.batching import Crew, answer_on_cluster, worker_starter

        with show_working(f"loading {models.model} in {max_workers} workers", messages):
            start_worker = worker_starter(
                make_worker, method, options.worker_cpus, options.worker_gpus
            )
            crew = Crew(start_worker, max_workers)

        def work(asked: Any, file: Any, tell: Any) -> Any:
            left = len(asked) - len(file.lines)
            meter = Meter(left, len(file.lines))
            with show_meter(meter, messages) as tick:
                return meter, answer_on_cluster(crew, asked, file, meter, tick, tell)

        yield crew.digest, work


def batch_worker(
    models: ModelOptions, backends: BackendOptions, name: str, limits: Limits
) -> tuple[Served, Limits]:
    """Loads the model of a worker, in its own process."""
    from foretell.serve.served import Served

    return Served(load_model(models, backends), name), limits


# --- servers


def serve_on_cluster(
    models: ModelOptions,
    backends: BackendOptions,
    options: ClusterOptions,
    settings: Settings,
    name: str,
    host: str,
    port: int,
) -> int:
    """Deploys the server. On a cluster of its own it stays until a signal ends it; on one that is
    there the server stays, and the command ends.
    """
    from foretell.cluster.cluster import check_installed, ray_cluster

    check_installed()
    min_workers, max_workers = options.counts()
    make_replica = partial(build_replica, portable_options(models), backends, settings, name)
    with ray_cluster(options.ray_address):
        from foretell.cluster.serving import Scale, deploy_server, end_server

        scale = Scale(
            min_replicas=min_workers,
            max_replicas=max_workers,
            cpus=options.worker_cpus,
            gpus=options.worker_gpus,
            busy=settings.running,
            body=settings.body,
            drain=settings.drain,
        )
        with show_working(f"loading {models.model} in {min_workers} processes", messages):
            deploy_server(make_replica, scale, host, port)
        message(f"{name} at http://{host}:{port}/v1, in {options.workers} processes")
        if options.ray_address is not None:
            message("the same command replaces it bit by bit; `serve shutdown` ends it")
            return 0
        _wait_for_signal()
        message(f"ending, when requests in flight are answered or {settings.drain:g} s are over")
        end_server()
    message("ended")
    return 0


def build_replica(
    models: ModelOptions, backends: BackendOptions, settings: Settings, name: str
) -> Any:
    """The application of one replica, in its own process."""
    from foretell.serve.app import build_app
    from foretell.serve.served import Served

    if settings.hosts:  # the replica asks itself for its health by this name
        settings = dataclasses.replace(settings, hosts=(*settings.hosts, "localhost"))
    return build_app(Served(load_model(models, backends), name), settings)


def _wait_for_signal() -> None:
    """Returns when the process is to end."""
    signal_event = threading.Event()
    handlers = {
        sign: signal.signal(sign, lambda *_: signal_event.set())
        for sign in (signal.SIGINT, signal.SIGTERM)
    }
    signal_event.wait()
    for sign, handler in handlers.items():
        signal.signal(sign, handler)
