"""The service that answers parsed requests: who may ask, the call, the numbers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from foretell.errors import DeadlineExceeded, ForetellError
from foretell.ops.memory import spare_bytes
from foretell.serve.bodies import VALUES
from foretell.serve.errors import ApiError, of_ours
from foretell.serve.keys import Key
from foretell.serve.learnt import Learnt
from foretell.serve.lifecycle import Health
from foretell.serve.limits import Gate
from foretell.serve.metrics import Metrics
from foretell.serve.responses import Answer, Scores, answer_for
from foretell.serve.schemas import CompletionRequest, Request, parse_json, parse_request
from foretell.serve.scoring import scoring_call
from foretell.serve.served import Served
from foretell.serve.settings import MEGABYTE, Settings
from foretell.serve.translate import MOST_CHOICES, translate_request
from foretell.serve.turns import Errand, Turns
from foretell.serve.wire import Gone

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.api.outputs import Output, Piece

R = TypeVar("R", bound=Request)
log = logging.getLogger("foretell.serve")
AT_ONCE = 4  # threads that read large requests, and compile forms; others need no turn
ARRIVING = 16  # large bodies that are read at once
FORMS = ("json_schema", "regex", "grammar")
LEAST = 1e-3  # seconds: a request that is late is told so by the engine
ROWS_SHARE = 0.8  # of free memory, what cache rows may take where nobody says
LEAST_ROWS = 64 * MEGABYTE
GRACE = 0.5  # seconds that a request may be late to end itself: it can between two steps only


@dataclass(frozen=True)
class Asker:
    """The client of a request, and since when it asks by the event loop's time. `client`: a name of
    the key or the address it asks from, which takes turns with others.
    """

    key: Key | None
    client: str
    arrived: float
    is_large: bool = False  # whether its body is


def rows_memory(lm: LM, settings: Settings) -> int | None:
    """Bytes that cache rows of running answers may take; None: no limit.

    Where the settings do not say: ROWS_SHARE of what is left once the model is loaded and rows of
    earlier prompts have theirs, so that answers wait or are computed anew before memory ends.
    """
    if settings.memory is not None or settings.budget is not None:
        return settings.memory
    free_bytes = spare_bytes(lm.models["target"].device)
    if free_bytes is None:
        return None
    return max(LEAST_ROWS, int(ROWS_SHARE * free_bytes) - settings.prefixes)


class Service:
    """Answers requests with one LM."""

    def __init__(self, served: Served, settings: Settings):
        self.served = served
        self.lm = served.lm
        self.settings = settings
        self.lm.limit(
            memory=rows_memory(served.lm, settings),
            requests=settings.running,
            between_tokens=settings.between_tokens,
            prefixes=settings.prefixes,
            budget=settings.budget,
        )
        self.lm.engine.admission.branches = 2 * MOST_CHOICES  # of methods that cannot tell before
        self.lm.engine.stores = Learnt(settings.learnt, self.lm.engine.stores)
        self.values = max(VALUES, self.lm.models["target"].context + 1024)
        self.arriving = Turns(ARRIVING, ARRIVING // 2)
        self.turns = Turns(AT_ONCE, AT_ONCE // 2)
        self.gate = Gate(settings.running, settings.waiting)
        self.health = Health(self.lm, self.gate, settings.check_every)
        sound = lambda: self.health.sound  # noqa: E731
        self.metrics = Metrics(served.name, self.lm.engine.status, self.gate, sound)

    async def read_request(self, kind: type[R], body: bytes, asker: Asker) -> R:
        """Parses the request that a body holds. Raises ApiError."""
        if not asker.is_large:
            return parse_request(kind, parse_json(body))
        return await self.turns.run_errand(
            asker.client, lambda _: parse_request(kind, parse_json(body))
        )

    async def answer_whole(self, request: Request, asker: Asker) -> dict[str, Any]:
        """Answers a request with one document. Raises ApiError."""
        api_key = asker.key
        with self.gate.enter_request(api_key):
            answer = await self._prepare_answer(request, asker)
            choice_count = len(answer.call.prompts)
            with self.gate.admit_answers(api_key, answer.call.texts, self._prompt_tokens(answer)):
                try:
                    outputs, scores = await asyncio.gather(
                        self._generate_outputs(answer, asker), self._score_prompts(answer, asker)
                    )
                except asyncio.CancelledError:
                    self._note_aborts(choice_count)
                    raise
                for index, output in enumerate(outputs):
                    self._note_end(answer, api_key, index, output)
            return await asyncio.to_thread(answer.full_answer, outputs, scores)

    async def answer_stream(
        self, request: Request, asker: Asker
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields a stream's documents. Raises ApiError, before the first or between any two."""
        api_key = asker.key
        with self.gate.enter_request(api_key):
            answer = await self._prepare_answer(request, asker)
            with self.gate.admit_answers(api_key, answer.call.texts, self._prompt_tokens(answer)):
                scores = await self._score_prompts(answer, asker)
                is_open = False
                async with aclosing(self._stream_pieces(answer, asker)) as pieces:
                    async for piece in pieces:
                        chunk = answer.make_chunk(piece)
                        if not is_open:
                            for document in answer.opening_chunks(scores):
                                yield document
                            is_open = True
                        if chunk is not None:
                            yield chunk
                for document in answer.closing_chunks():
                    yield document

    # --- the parts

    async def _prepare_answer(self, request: Request, asker: Asker) -> Answer:
        """Translates a request; returns its call with who will write its answer."""
        model_name = self.served.name
        if request.model is not None and request.model != model_name:
            raise ApiError(
                f"the model {request.model!r} is not served here, but {model_name!r} is",
                "model",
                "model_not_found",
                HTTPStatus.NOT_FOUND,
            )
        tenant = ""
        if asker.key is not None and not self.settings.share_between_keys:
            tenant = asker.key.name
        end_time = self._end_time(request, asker)
        remaining_seconds = (
            math.inf if end_time is None else end_time - GRACE - asyncio.get_running_loop().time()
        )
        translate_work = partial(
            self._translate_request, request, tenant, time.perf_counter() + remaining_seconds
        )
        has_form = request.response_format is not None or request.structured_outputs is not None
        try:
            async with asyncio.timeout_at(self._end_time(request, asker)):
                if asker.is_large or has_form:
                    answer = await self.turns.run_errand(asker.client, translate_work)
                else:
                    answer = await asyncio.to_thread(translate_work, Errand())
        except TimeoutError:
            raise of_ours(_late_error()) from None
        if self.settings.log_prompts:
            log.info("%s: %s", answer.id, request.model_dump_json(exclude_none=True))
        return answer

    def _translate_request(
        self, request: Request, tenant: str, until: float, errand: Errand
    ) -> Answer:
        def go_on() -> None:
            if errand.over:
                raise Gone

        call = translate_request(request, self.lm, tenant, bounds=self.settings.bounds, go_on=go_on)
        try:
            answer = answer_for(self.served, request, call)
        except ForetellError as error:  # the method is resolved there
            raise ApiError(f"method: {error}", "method", "invalid_value") from error
        go_on()
        answer_form = {name: call.arguments[name] for name in FORMS if name in call.arguments}
        if answer_form:  # now, in its turn, and not when it is taken in
            try:
                self.lm.compile(answer_form, tenant, until)
            except ForetellError as error:
                raise self._make_refusal(error, answer) from error
        return answer

    def _prompt_tokens(self, answer: Answer) -> int:
        call = answer.call
        token_count = sum(map(len, call.prompts[:: call.n]))
        self.metrics.note_prompt(token_count)
        return token_count

    def _end_time(self, request: Request, asker: Asker) -> float | None:
        """The time by which the request has an answer in any case. Its time began when its head had
        come.
        """
        seconds = self.settings.bounds.max_seconds(request)
        return None if seconds is None else asker.arrived + seconds + GRACE

    def _timed_arguments(self, answer: Answer, asker: Asker) -> dict[str, Any]:
        """The arguments of a call, with the seconds that are left of its time."""
        end_time = self._end_time(answer.request, asker)
        if end_time is None:
            return answer.call.arguments
        remaining_seconds = end_time - GRACE - asyncio.get_running_loop().time()
        return answer.call.arguments | {"timeout": max(remaining_seconds, LEAST)}

    async def _generate_outputs(self, answer: Answer, asker: Asker) -> list[Output]:
        call = answer.call
        try:
            async with asyncio.timeout_at(self._end_time(answer.request, asker)):
                outputs: list[Output] = await self.lm.agenerate(
                    call.prompts, call.method, **self._timed_arguments(answer, asker)
                )
                return outputs
        except TimeoutError:
            self._note_aborts(len(call.prompts))
            raise of_ours(_late_error()) from None
        except ForetellError as error:
            raise self._make_refusal(error, answer) from error

    async def _score_prompts(self, answer: Answer, asker: Asker) -> Scores | None:
        """Log-probabilities of the prompts, where they are to be echoed with them."""
        request, call = answer.request, answer.call
        if not isinstance(request, CompletionRequest):
            return None
        if not request.echo or request.logprobs is None:
            return None
        timed_arguments = self._timed_arguments(answer, asker)
        request_terms = {
            name: timed_arguments[name]
            for name in ("tenant", "priority", "timeout")
            if name in timed_arguments
        }
        scoring_arguments = scoring_call(call.prompts[:: call.n], request.logprobs, **request_terms)
        try:
            outputs = await self.lm.agenerate(**scoring_arguments)
        except ForetellError as error:
            raise of_ours(error) from error
        for output in outputs:
            if output.error is not None:
                raise of_ours(output.error)
        return [output.logprobs for output in outputs]

    async def _stream_pieces(self, answer: Answer, asker: Asker) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of all choices, counted."""
        call = answer.call
        unfinished = len(call.prompts)
        end_time = self._end_time(answer.request, asker)
        arguments = self._timed_arguments(answer, asker)
        try:
            async with aclosing(self.lm.astream(call.prompts, call.method, **arguments)) as pieces:
                while unfinished:
                    async with asyncio.timeout_at(end_time):
                        piece = await anext(pieces)
                    if piece.finish_reason is not None:
                        unfinished -= 1
                        self._note_end(answer, asker.key, piece.prompt, piece)
                    yield piece
        except TimeoutError:
            self._note_aborts(unfinished)
            raise of_ours(_late_error()) from None
        except ForetellError as error:
            raise self._make_refusal(error, answer) from error
        except (asyncio.CancelledError, GeneratorExit):
            self._note_aborts(unfinished)
            raise

    def _note_end(
        self, answer: Answer, key: Key | None, index: int, last_output: Output | Piece
    ) -> None:
        """Notes the end of a choice by its number; `last_output`: its output, or its last piece."""
        token_limit = answer.call.arguments["max_new_tokens"][index]
        self.metrics.note_answer(last_output.stats, str(last_output.finish_reason), token_limit)
        self.gate.note_answers(key, 1, last_output.stats.tokens if last_output.stats else 0)
        self._log_failure(last_output.error, answer)

    def _make_refusal(self, error: ForetellError, answer: Answer) -> ApiError:
        """The refusal that the client is told; for a form, with the field in which it was given."""
        self._log_failure(error, answer)
        refusal = of_ours(error)
        if refusal.param == "response_format" and answer.request.structured_outputs is not None:
            refusal.param = "structured_outputs"
        return refusal

    def _note_aborts(self, answers: int) -> None:
        for _ in range(answers):
            self.metrics.note_answer(None, "abort")

    def _log_failure(self, error: ForetellError | None, answer: Answer) -> None:
        """Logs the cause of a request that broke: clients are not told."""
        if error is not None and of_ours(error).status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("%s failed: %s", answer.id, error, exc_info=error)


def _late_error() -> DeadlineExceeded:
    return DeadlineExceeded("the request was not done in the time it was given")
