"""The server on a Ray cluster: data parallel replicas of one model after one door, as
`foretell serve --ray` starts them.

    client -> Ray's proxy -> Door: reads the body, knows its prefix -> PrefixRouter -> Replica

A replica is the server's own application in a process of its own, so all it answers is what one
machine answers. Ray Serve starts and ends replicas with the load, starts a dead one again, asks for
their health, and replaces them one by one where the same application is deployed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from foretell.cluster.numbers import merge_metrics
from foretell.cluster.prefixes import prefix_key
from foretell.cluster.routing import BUSY, PrefixRouter
from foretell.errors import RequestFailed
from foretell.serve.errors import ApiError

NAME = "foretell"  # of the application in Ray Serve
TRIES = 3  # replicas that a request is given to, where they die before they answer
BODY = 1 << 22  # bytes of a request's body
ROOM = 4  # times BUSY: requests that a replica takes in at most
HEALTH_TIMEOUT = 30.0  # seconds that a replica may take to say that it is well
METRICS = 10.0  # seconds that replicas have to tell their numbers
QUEUE = 256  # requests that wait for a replica before others are refused
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
ERROR = re.compile(r"[\w.]*(Error|Bad\w+|Unsupported|Exception)\b")  # begins its line
App = Callable[[Any, Any, Any], Any]  # what ASGI calls an application
Message = dict[str, Any]  # one of ASGI's
Headers = list[tuple[bytes, bytes]]
HEALTH: Message = {
    "type": "http",
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/health",
    "raw_path": b"/health",
    "query_string": b"",
    "headers": [(b"host", b"localhost")],
}


@dataclass(frozen=True)
class Scale:
    """How many replicas, and what one of them takes of the cluster."""

    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    busy: int = BUSY  # requests of a replica above which its prompts go to the next one
    body: int = BODY
    drain: float = 30.0  # seconds that a replica which is to end may take for its requests
    health_every: float = 10.0  # seconds; a replica that is ill three times is replaced


class Whole(NamedTuple):
    """An answer, and the name of the replica that gave it."""

    replica: str
    status: int
    headers: Headers
    body: bytes


class Replica:
    """Process with the model, whose application `make` builds there."""

    def __init__(self, make: Callable[[], App]):
        self.app = make()
        self.running = contextlib.AsyncExitStack()
        self.started = asyncio.Lock()
        self.ready = False

    async def answer(
        self, key: str, scope: Mapping[str, Any], body: bytes
    ) -> AsyncIterator[Message]:
        """ASGI's messages of one answer. `key` is the router's. Closing it ends the request, as if
        its client had gone.
        """
        await self.start()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self.app(dict(scope), receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task  # raises what the application raised
        finally:
            gone.set()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def start(self) -> None:
        """Begins what the application does beside requests."""
        async with self.started:
            if not self.ready:
                router = getattr(self.app, "router", None)
                if router is not None:
                    await self.running.enter_async_context(router.lifespan_context(self.app))
                self.ready = True

    async def full_answer(self, scope: Mapping[str, Any]) -> Whole:
        """The whole answer to a request without a body."""
        status, headers, parts = 0, Headers(), []
        async for message in self.answer("", scope, b""):
            status = message.get("status", status)
            headers = message.get("headers", headers)
            parts.append(message.get("body", b""))
        return Whole(serve.get_replica_context().replica_tag, status, headers, b"".join(parts))

    async def check_health(self) -> None:
        """Ray Serve asks for it every few seconds, and replaces a replica that raises again and
        again.
        """
        answer = await self.full_answer(HEALTH)
        if answer.status != HTTPStatus.OK:
            raise RuntimeError(f"/health answers {answer.status}: {answer.body[:200]!r}")

    async def close(self) -> None:
        """Ends what `start` began."""
        await self.running.aclose()


class Deployed(Replica):
    """A replica as Ray Serve keeps it."""

    async def __del__(self) -> None:
        """Ray Serve awaits it when the replica ends, after its last request."""
        await self.close()


class Door:
    """Reads requests and gives each to the replica that knows how its prompt begins."""

    def __init__(self, replicas: DeploymentHandle[Replica], body: int = BODY):
        self.replicas: Any = replicas.options(stream=True, method_name="answer")
        self.limit = body

    async def __call__(self, request: Request) -> Response:
        try:
            body = await self.body(request)
            if request.url.path == "/metrics":
                return await self.metrics(request)
            scope = scope_of(request)
            tenant = request.headers.get("authorization", "").encode()
            messages = self.messages(prefix_key(body, tenant), scope, body)
            start = await anext(messages)
        except ApiError as error:
            return JSONResponse(error.json_body(), error.status, error.headers)
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
        response = StreamingResponse(
            (message.get("body", b"") async for message in messages), start["status"]
        )
        response.raw_headers = list(start["headers"])
        return response

    async def metrics(self, request: Request) -> Response:
        """The numbers of all replicas, each with the replica's name."""
        responses = self.replicas.broadcast("full_answer", scope_of(request))
        answers: list[Whole] = await responses.results_async(timeout_s=METRICS)
        for answer in answers:
            if answer.status != HTTPStatus.OK:
                response = Response(answer.body, answer.status)
                response.raw_headers = list(answer.headers)
                return response
        pages = {answer.replica: answer.body.decode() for answer in answers}
        return Response(merge_metrics(pages), media_type=CONTENT_TYPE_LATEST)

    async def body(self, request: Request) -> bytes:
        """The whole body. Raises ApiError where it is too long."""
        parts = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self.limit:
                raise ApiError(
                    f"the body has more than {self.limit} bytes; send less at once",
                    None,
                    "request_too_large",
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                )
            parts.append(part)
        return b"".join(parts)

    async def messages(
        self, key: str, scope: Mapping[str, Any], body: bytes
    ) -> AsyncIterator[Message]:
        """ASGI's messages of the answer, from the beginning of the answer on.

        A replica that dies before it answers anything is replaced by another one. Once a part has
        been sent the answer cannot begin again, and the connection breaks. Raises ApiError.
        """
        for _ in range(TRIES):
            begun = False
            try:
                async for message in self.replicas.remote(key, scope, body):
                    begun = True
                    yield message
                return
            except BackPressureError:
                raise ApiError(
                    "all replicas are busy; try again in a second",
                    None,
                    "overloaded",
                    HTTPStatus.TOO_MANY_REQUESTS,
                    {"Retry-After": "1"},
                ) from None
            except RayActorError:
                if begun:
                    raise
        raise ApiError(
            "the replicas that had this request ended before they answered; try again",
            None,
            "replica_died",
            HTTPStatus.SERVICE_UNAVAILABLE,
            {"Retry-After": "1"},
        )


def scope_of(request: Request) -> Message:
    """Parts of a request's scope that can travel to another process."""
    return {name: request.scope[name] for name in SCOPE if name in request.scope}


def build_application(make: Callable[[], App], scale: Scale) -> serve.Application:
    """Builds the application that Ray Serve runs: the door, and after it the replicas."""
    count: dict[str, Any] = {"num_replicas": scale.min_replicas}
    if scale.max_replicas > scale.min_replicas:
        count = {
            "autoscaling_config": {
                "min_replicas": scale.min_replicas,
                "max_replicas": scale.max_replicas,
                "target_ongoing_requests": max(1, scale.busy // 2),
            }
        }
    router: Any = PrefixRouter
    replicas: Any = serve.deployment(
        Deployed,
        name="replicas",
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        max_ongoing_requests=ROOM * scale.busy,
        max_queued_requests=QUEUE,
        graceful_shutdown_timeout_s=scale.drain,
        health_check_period_s=scale.health_every,
        health_check_timeout_s=HEALTH_TIMEOUT,
        request_router_config=RequestRouterConfig(
            request_router_class=router, request_router_kwargs={"busy": scale.busy}
        ),
        **count,
    )
    door: Any = serve.deployment(
        Door,
        name="door",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10 * QUEUE,
        graceful_shutdown_timeout_s=scale.drain,
    )
    bound: serve.Application = door.bind(replicas.bind(make), scale.body)
    return bound


def deploy_server(make: Callable[[], App], scale: Scale, host: str, port: int) -> None:
    """Starts the server on the cluster that this process is connected to, or replaces what is
    served there, replica by replica. Raises RequestFailed where its replicas cannot start.
    """
    quiet_logs()
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(build_application(make, scale), name=NAME)
    except RuntimeError as error:
        raise RequestFailed(f"the replicas cannot be started: {death_cause(error)}") from error


def death_cause(error: RuntimeError) -> str:
    """Returns the line of Ray Serve's long story that says what a replica died of."""
    status_message = serve.status().applications[NAME].deployments["replicas"].message
    lines = [line.strip() for line in (status_message or str(error)).splitlines() if line.strip()]
    error_lines = [line for line in lines if ERROR.match(line)]
    return (error_lines or lines)[-1]


def end_server() -> None:
    """Ends the server when its requests are answered, or their time is over."""
    serve.shutdown()


def quiet_logs() -> None:
    """Ray Serve tells its log files what it does, and this process what went wrong."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
