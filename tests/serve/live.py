"""A server for tests: the tiny model on loopback, in a thread, at a port that is free."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from foretell.api.lm import LM
from foretell.serve.app import build_app
from foretell.serve.connections import Config
from foretell.serve.lifecycle import Server
from foretell.serve.served import Served
from foretell.serve.service import Service
from foretell.serve.settings import Settings
from tests import tiny

NAME = "tiny"
SECONDS = 20.0  # that anything here may take


@dataclass
class Live:
    """A running server."""

    url: str
    lm: LM
    service: Service
    server: Server

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=SECONDS, trust_env=False, **options)


@contextmanager
def running(lm: LM | None = None, settings: Settings | None = None) -> Iterator[Live]:
    """A server, until the block is left."""
    lm = lm or tiny.lm(draft=False)
    settings = settings or Settings()
    app = build_app(Served(lm, NAME), settings)
    service: Service = app.state.service
    # With the protocol named, as the command has it, or answers wait to be acknowledged.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = Server(Config(app, settings.patience), service.gate, settings.drain)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            until(lambda: server.started)
            yield Live(f"http://127.0.0.1:{port}", lm, service, server)
        finally:
            server.end_now()
            thread.join(SECONDS)
            assert not thread.is_alive()


def until(holds: Callable[[], bool]) -> None:
    """Waits for it."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)
