"""`foretell serve`: a server that OpenAI's clients can talk to."""

from __future__ import annotations

import ipaddress
import math
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli._cluster import ClusterOptions, serve_on_cluster
from foretell.cli._loading import load_model
from foretell.cli._options import BackendOptions, ChatModelOptions, Method, check_method
from foretell.cli._output import message
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.serve.served import Served
    from foretell.serve.settings import Settings

GIGABYTE = 2**30
MEGABYTE = 2**20
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class DoorOptions:
    """Options that say where the server listens, and to whom."""

    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="API keys, one a line, each with its limits: see docs/serving.md."),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Let anybody ask who reaches the address, without keys."),
    ] = False
    share_between_keys: Annotated[
        bool,
        typer.Option(
            "--share-between-keys",
            help="What drafters learn and known prefixes serve all keys, who may notice by time.",
        ),
    ] = False
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A site whose pages may ask. Repeatable."),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name to answer to besides localhost. Repeatable."),
    ] = None
    monitor: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Requests may ask for constraint=monitor: a language server on this folder.",
        ),
    ] = None
    allow_tests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Run programs that the model writes, in a sandbox, on the tests of this file.",
        ),
    ] = None
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write what is asked into the log.")
    ] = False


@dataclass(frozen=True)
class LoadOptions:
    """How much the server takes on."""

    max_requests: Annotated[
        int, typer.Option(min=1, help="Answers computed at once; others wait.")
    ] = 32
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Answers that may wait; more are told to come back.")
    ] = 128
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GB", help="Cache rows of running answers. Without it, most of what is free."
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="GB", help="Everything that models and answers take. Without it, no limit."
        ),
    ] = None
    prefix_memory: Annotated[
        float,
        typer.Option(min=0, metavar="GB", help="Cache rows kept for prompts that begin alike."),
    ] = 0.5
    between_tokens: Annotated[
        float | None,
        typer.Option(
            metavar="MS", help="Between two steps of a text while long prompts are taken in."
        ),
    ] = None
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a prompt. Without it, what the context holds.")
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an answer. Without it, what the context holds.")
    ] = None
    max_body: Annotated[float, typer.Option(metavar="MB", help="Of a request.")] = 8.0
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0
    patience: Annotated[float, typer.Option(help="Seconds for a client to send or to read on.")] = (
        30.0
    )
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="For requests in flight once the server is to end.")
    ] = 30.0


def serve(
    models: ChatModelOptions,
    backends: BackendOptions,
    door: DoorOptions,
    load: LoadOptions,
    cluster: ClusterOptions,
    method: Method = "auto",
    name: Annotated[
        str | None, typer.Option(help="What clients call the model. Without it, --model's value.")
    ] = None,
) -> int:
    """Serve a model over HTTP, as OpenAI's clients expect it."""
    from foretell.serve import check_installed

    check_installed()
    check_method(method)
    cluster.counts()
    settings = _serve_settings(door, load, method)
    listening = _open_socket(door)
    if cluster.ray:
        host, port = listening.getsockname()[:2]
        listening.close()  # the port is free; Ray's own proxy listens there
        title = name or models.model
        return serve_on_cluster(models, backends, cluster, settings, title, host, port)
    try:
        lm = load_model(models, backends)
        _check_kind(lm, method)
        lm.bring(method)
        from foretell.serve.served import Served

        served = Served(lm, name or models.model)
        return _run_server(served, settings, listening)
    finally:
        listening.close()


def _check_kind(lm: LM, method: str) -> None:
    """Raises Unsupported where the one fills canvases and the other writes from left to right."""
    needs = lm.resolve(method)[1].needs
    if ("canvas" in needs) != ("canvas" in lm.models["target"].caps):
        lm.generate([0], method, max_new_tokens=0)  # which says what is lacking


def _serve_settings(door: DoorOptions, load: LoadOptions, method: str) -> Settings:
    """Makes the server's settings of options. Raises BadConfig, BadFile or Unsupported."""
    from foretell.serve.keys import Keys, read_keys
    from foretell.serve.settings import Settings
    from foretell.serve.translate import Bounds
    from foretell.spec import build_method

    tests = "" if door.allow_tests is None else str(door.allow_tests)
    if tests:
        build_method("tests", "reward", {"path": tests})  # so that a fault is told before the start
    keys = Keys()
    if door.api_key_file is not None:
        keys, warning = read_keys(door.api_key_file)
        if warning:
            message(f"warning: {warning}")
    if not keys and not door.insecure and not _is_local(door.host):
        raise BadConfig(
            f"--host {door.host}: others can reach it, and nobody needs a key; "
            "give --api-key-file, or --insecure if that is meant"
        )
    for option, value in (
        ("--memory", load.memory),
        ("--budget", load.budget),
        ("--between-tokens", load.between_tokens),
        ("--max-body", load.max_body),
        ("--timeout", load.timeout),
        ("--patience", load.patience),
    ):
        if value is not None and not 0 < value < math.inf:
            raise BadConfig(f"{option} {value:g}: must be above 0")
    if door.monitor is not None and not door.monitor.is_dir():
        raise BadConfig(f"--monitor {door.monitor}: there is no such folder; name one that exists")
    monitor = None if door.monitor is None else str(door.monitor.resolve())
    hosts: tuple[str, ...] = ()
    if not keys and _is_local(door.host):
        hosts = (*LOCAL_NAMES, door.host.lower(), *map(str.lower, door.allow_host or ()))
    elif door.allow_host:
        hosts = tuple(map(str.lower, door.allow_host))
    return Settings(
        keys=keys,
        bounds=Bounds(
            method, load.max_prompt_tokens, load.max_tokens, load.timeout, monitor, tests
        ),
        running=load.max_requests,
        waiting=load.max_waiting,
        memory=None if load.memory is None else int(load.memory * GIGABYTE),
        budget=None if load.budget is None else int(load.budget * GIGABYTE),
        prefixes=int(load.prefix_memory * GIGABYTE),
        between_tokens=None if load.between_tokens is None else load.between_tokens / 1000,
        share_between_keys=door.share_between_keys,
        body=int(load.max_body * MEGABYTE),
        patience=load.patience,
        drain=load.drain_seconds,
        origins=tuple(door.cors or ()),
        hosts=hosts,
        log_prompts=door.log_prompts,
    )


def _is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _open_socket(door: DoorOptions) -> socket.socket:
    """A socket at the address, before anything slow begins. Raises BadConfig."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            door.host, door.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise BadConfig(f"--host {door.host}: {error.strerror}; give an address") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise BadConfig(
            f"{door.host} port {door.port}: {error.strerror}; choose another with --port or --host"
        ) from error
    return listening


def _run_server(served: Served, settings: Settings, listening: socket.socket) -> int:
    """Serves until a signal ends it."""
    from foretell.serve.app import build_app
    from foretell.serve.connections import Config
    from foretell.serve.lifecycle import Server
    from foretell.serve.logs import begin_logging

    begin_logging(sys.stderr)
    app = build_app(served, settings)
    server = Server(Config(app, settings.patience), app.state.service.gate, settings.drain)
    listening.listen()  # from here on clients wait rather than fail
    host, port = listening.getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host
    name, guarantee = served.describe_method(settings.bounds.method)
    message(
        f"{served.name} at http://{shown_host}:{port}/v1, and a page at http://{shown_host}:{port}/"
    )
    message(f"method {name}, computed by {served.computed_by}; its answers are {guarantee}")
    message(_who_may_ask(settings, host))
    server.run(sockets=[listening])
    message("ended")
    return 0


def _who_may_ask(settings: Settings, host: str) -> str:
    if settings.keys:
        return f"{len(settings.keys.keys)} API keys may ask"
    return "programs of this machine may ask" if _is_local(host) else "anybody may ask: no keys"
