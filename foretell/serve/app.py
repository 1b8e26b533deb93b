"""The routes, as one FastAPI application over a `Service`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route

import foretell
from foretell.api.defaults import baseline_method
from foretell.constraints.grammar_trials import TRIALS
from foretell.serve.bodies import LARGE, read_body
from foretell.serve.errors import ApiError
from foretell.serve.guard import Guard
from foretell.serve.schemas import ChatRequest, CompletionRequest, Request
from foretell.serve.served import Served
from foretell.serve.service import Asker, Service
from foretell.serve.settings import Settings
from foretell.serve.wire import EventStream, error_response, json_response, while_there

PAGE = Path(__file__).parent / "page"
WORKERS = 32  # threads that read prompts and hand requests to the engine
SCHEMAS = "#/components/schemas/{model}"  # where the description has them
ERRORS: dict[int | str, dict[str, Any]] = {}
for _status in (400, 401, 404, 408, 413, 415, 429, 500, 503):
    ERRORS[_status] = {"description": HTTPStatus(_status).phrase}


def build_app(served: Served, settings: Settings | None = None) -> FastAPI:
    """Builds the application. Its `state.service` is the Service after it."""
    settings = settings or Settings()
    answer_service = Service(served, settings)
    app = FastAPI(
        title="foretell",
        version=foretell.__version__,
        description="OpenAI's interface, with the method, and what it guarantees, in each answer.",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan,
        dependencies=[Depends(HTTPBearer(auto_error=False))],  # said in the description
        responses=ERRORS,
    )
    app.state.service = answer_service
    _add_errors(app)
    _add_completions(app, answer_service)
    _add_numbers(app, answer_service)
    _add_page(app)
    _describe_bodies(app)
    app.add_middleware(Guard, settings=settings, report_status=answer_service.metrics.note_response)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


def _add_page(app: FastAPI) -> None:
    """Adds a path for each file of the page, so that other paths are answered as what they are."""
    for page_file in PAGE.rglob("*.*"):
        file_name = page_file.relative_to(PAGE).as_posix()
        route_paths = ["/", f"/{file_name}"] if file_name == "index.html" else [f"/{file_name}"]
        for route_path in route_paths:
            app.router.routes.append(
                Route(route_path, _file_sender(page_file), methods=["GET", "HEAD"])
            )


def _file_sender(file: Path) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def send(request: HttpRequest) -> Response:
        # Asked for anew each time: an old module must not meet a new one.
        return FileResponse(file, headers={"Cache-Control": "no-cache"})

    return send


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    event_loop = asyncio.get_running_loop()
    event_loop.set_default_executor(
        ThreadPoolExecutor(WORKERS, thread_name_prefix="foretell-serve")
    )
    health_task = asyncio.create_task(app.state.service.health.watch_idle())
    try:
        yield
    finally:
        TRIALS.end_processes()
        health_task.cancel()
        with suppress(asyncio.CancelledError):
            await health_task


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def answer_refusal(request: HttpRequest, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: HttpRequest, error: HTTPException) -> Response:
        request_line = f"{request.method} {request.url.path}"
        message = {
            404: f"{request_line}: there is nothing here",
            405: f"{request_line}: not this method",
        }.get(error.status_code, str(error.detail))
        headers = error.headers
        return error_response(ApiError(message, status=error.status_code, headers=headers))


def _add_completions(app: FastAPI, service: Service) -> None:
    async def answer(http_request: HttpRequest, kind: type[Request]) -> Response:
        api_key, client = http_request.state.key, http_request.state.client
        service.gate.check_key(api_key)
        body = await read_body(http_request, service.arriving, service.values)
        asker = Asker(api_key, client, http_request.state.arrived, len(body) > LARGE)
        request = await while_there(http_request, service.read_request(kind, body, asker))
        if request.stream:
            return EventStream(service.answer_stream(request, asker), service.settings.patience)
        return json_response(await while_there(http_request, service.answer_whole(request, asker)))

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(http: HttpRequest) -> Response:
        """Continues a text, or several."""
        return await answer(http, CompletionRequest)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(http: HttpRequest) -> Response:
        """Answers in a conversation."""
        return await answer(http, ChatRequest)


def _body_schema(kind: type[Request]) -> dict[str, Any]:
    """The description of a body, which FastAPI does not read: it would on the loop."""
    content = {"application/json": {"schema": {"$ref": SCHEMAS.format(model=kind.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe_bodies(app: FastAPI) -> None:
    """Adds the bodies to the description of the routes."""
    plain_openapi = app.openapi

    def described() -> dict[str, Any]:
        description_document = plain_openapi()
        body_kinds: list[Any] = [(kind, "validation") for kind in (CompletionRequest, ChatRequest)]
        body_schemas = models_json_schema(body_kinds, ref_template=SCHEMAS)[1]["$defs"]
        description_document.setdefault("components", {}).setdefault("schemas", {}).update(
            body_schemas
        )
        return description_document

    app.openapi = described  # type: ignore[method-assign]


def _add_numbers(app: FastAPI, service: Service) -> None:
    served = service.served
    model_card = {
        "id": served.name,
        "object": "model",
        "created": served.since,
        "owned_by": "foretell",
        "max_model_len": served.lm.models["target"].context,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        """Lists the one model that is served."""
        return json_response({"object": "list", "data": [model_card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Describes a model."""
        if name != served.name:
            raise ApiError(
                f"the model {name!r} is not served here",
                "model",
                "model_not_found",
                HTTPStatus.NOT_FOUND,
            )
        return json_response(model_card)

    @app.get("/health")
    async def health() -> Response:
        """Tells whether the server takes requests, and what the last check of its caches found."""
        document = service.health.describe_health()
        status = 200 if document["status"] == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return json_response(document, status)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": foretell.__version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Gives the numbers for Prometheus."""
        return Response(service.metrics.render_text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/foretell/status")
    async def status() -> Response:
        """Tells what the engine does and has done, and the methods that a request may name."""
        numbers = served.lm.engine.status()
        names = {
            "model": served.name,
            "computed_by": served.computed_by,
            "context": model_card["max_model_len"],
            "method": served.describe_method(service.settings.bounds.method)[0],
            "methods": served.methods,
            "plain": baseline_method(served.lm.models["target"]),
        }
        return json_response(numbers | names)
