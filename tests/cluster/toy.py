"""What the tests of Ray deploy: a server without a model, and workers with a tiny one.

Ray imports this file in other processes.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

PAGE = "# HELP asked_total Requests.\n# TYPE asked_total counter\nasked_total {}\n"


class Server:
    """Answers with the process it runs in; `sleep` and `parts` of a body are what they say."""

    def __init__(self, folder: Path, version: str):
        self.folder = folder  # where it leaves notes
        self.version = version
        self.asked = 0

    async def completions(self, request: Request) -> Response:
        self.asked += 1
        body = json.loads(await request.body())
        self.note("began")
        await asyncio.sleep(body.get("sleep", 0))
        told = {"pid": os.getpid(), "version": self.version}
        if body.get("parts"):
            return StreamingResponse(self.parts(body["parts"]), headers={"X-Told": str(told)})
        return JSONResponse(told)

    async def parts(self, count: int) -> AsyncIterator[str]:
        try:
            for i in range(count):
                yield f"part {i}\n"
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.note("left")
            raise

    async def health(self, request: Request) -> Response:
        return JSONResponse({}, 503 if (self.folder / "ill").exists() else 200)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(PAGE.format(self.asked))

    def note(self, word: str) -> None:
        (self.folder / f"{word}-{os.getpid()}").touch()


def app(folder: Path, version: str = "1") -> Starlette:
    server = Server(folder, version)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        server.note("started")
        yield
        server.note("ended")

    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def tiny_server() -> Any:
    """The real application over a tiny random model."""
    from foretell.serve.app import build_app

    return build_app(served())


def served() -> Any:
    import foretell
    from foretell.serve.served import Served
    from tests.tiny import llama, tokenizer

    return Served(foretell.wrap(llama(), tokenizer()), "tiny")


def worker() -> Any:
    """What a worker of a batch loads."""
    from foretell.batch.running import Limits

    return served(), Limits(2**30, 4)
