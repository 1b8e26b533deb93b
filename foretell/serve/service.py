"""From a request that was read to its answer: who may ask, the call, the numbers."""

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
from foretell.ops.memory import spare
from foretell.serve.bodies import VALUES
from foretell.serve.errors import ApiError, of_ours
from foretell.serve.keys import Key
from foretell.serve.learnt import Learnt
from foretell.serve.lifecycle import Health
from foretell.serve.limits import Gate
from foretell.serve.metrics import Metrics
from foretell.serve.responses import Answer, Scores, answer_for
from foretell.serve.schemas import CompletionRequest, Request, document, parse
from foretell.serve.scoring import scoring
from foretell.serve.served import Served
from foretell.serve.settings import MEGABYTE, Settings
from foretell.serve.translate import MOST_CHOICES, translate
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
    """Who asks, and since when by the event loop's time. `client`: a name of the key or the address
    it asks from, which takes turns with others.
    """

    key: Key | None
    client: str
    arrived: float
    large: bool = False  # whether its body is


def rows_memory(lm: LM, settings: Settings) -> int | None:
    """Bytes that cache rows of running answers may take; None: no limit.

    Where the settings do not say: ROWS_SHARE of what is left once the model is loaded and rows of
    earlier prompts have theirs, so that answers wait or are computed anew before memory ends.
    """
    if settings.memory is not None or settings.budget is not None:
        return settings.memory
    left = spare(lm.models["target"].device)
    if left is None:
        return None
    return max(LEAST_ROWS, int(ROWS_SHARE * left) - settings.prefixes)


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

    async def read(self, kind: type[R], body: bytes, asker: Asker) -> R:
        """The request that a body holds. Raises ApiError."""
        if not asker.large:
            return parse(kind, document(body))
        return await self.turns.run(asker.client, lambda _: parse(kind, document(body)))

    async def whole(self, request: Request, asker: Asker) -> dict[str, Any]:
        """A whole answer. Raises ApiError."""
        key = asker.key
        with self.gate.request(key):
            answer = await self._answer(request, asker)
            count = len(answer.call.prompts)
            with self.gate.admitted(key, answer.call.texts, self._prompt_tokens(answer)):
                try:
                    outputs, scores = await asyncio.gather(
                        self._outputs(answer, asker), self._scores(answer, asker)
                    )
                except asyncio.CancelledError:
                    self._aborted(count)
                    raise
                for index, output in enumerate(outputs):
                    self._ended(answer, key, index, output)
            return await asyncio.to_thread(answer.whole, outputs, scores)

    async def stream(self, request: Request, asker: Asker) -> AsyncGenerator[dict[str, Any], None]:
        """The documents of a stream. Raises ApiError, before the first or between any two."""
        key = asker.key
        with self.gate.request(key):
            answer = await self._answer(request, asker)
            with self.gate.admitted(key, answer.call.texts, self._prompt_tokens(answer)):
                scores = await self._scores(answer, asker)
                opened = False
                async with aclosing(self._pieces(answer, asker)) as pieces:
                    async for piece in pieces:
                        chunk = answer.chunk(piece)
                        if not opened:
                            for document in answer.opening(scores):
                                yield document
                            opened = True
                        if chunk is not None:
                            yield chunk
                for document in answer.closing():
                    yield document

    # --- the parts

    async def _answer(self, request: Request, asker: Asker) -> Answer:
        """The call of a request, with who will write its answer."""
        name = self.served.name
        if request.model is not None and request.model != name:
            raise ApiError(
                f"the model {request.model!r} is not served here, but {name!r} is",
                "model",
                "model_not_found",
                HTTPStatus.NOT_FOUND,
            )
        tenant = ""
        if asker.key is not None and not self.settings.share_between_keys:
            tenant = asker.key.name
        end = self._end(request, asker)
        left = math.inf if end is None else end - GRACE - asyncio.get_running_loop().time()
        work = partial(self._translated, request, tenant, time.perf_counter() + left)
        formed = request.response_format is not None or request.structured_outputs is not None
        try:
            async with asyncio.timeout_at(self._end(request, asker)):
                if asker.large or formed:
                    answer = await self.turns.run(asker.client, work)
                else:
                    answer = await asyncio.to_thread(work, Errand())
        except TimeoutError:
            raise of_ours(_late()) from None
        if self.settings.log_prompts:
            log.info("%s: %s", answer.id, request.model_dump_json(exclude_none=True))
        return answer

    def _translated(self, request: Request, tenant: str, until: float, errand: Errand) -> Answer:
        def go_on() -> None:
            if errand.over:
                raise Gone

        call = translate(request, self.lm, tenant, bounds=self.settings.bounds, go_on=go_on)
        try:
            answer = answer_for(self.served, request, call)
        except ForetellError as error:  # the method is resolved there
            raise ApiError(f"method: {error}", "method", "invalid_value") from error
        go_on()
        form = {name: call.arguments[name] for name in FORMS if name in call.arguments}
        if form:  # now, in its turn, and not when it is taken in
            try:
                self.lm.compile(form, tenant, until)
            except ForetellError as error:
                raise self._refusal(error, answer) from error
        return answer

    def _prompt_tokens(self, answer: Answer) -> int:
        call = answer.call
        tokens = sum(map(len, call.prompts[:: call.n]))
        self.metrics.prompt(tokens)
        return tokens

    def _end(self, request: Request, asker: Asker) -> float | None:
        """When the request has an answer in any case. Its time began when its head had come."""
        seconds = self.settings.bounds.seconds(request)
        return None if seconds is None else asker.arrived + seconds + GRACE

    def _left(self, answer: Answer, asker: Asker) -> dict[str, Any]:
        """The arguments of its call, with the seconds that are left of its time."""
        end = self._end(answer.request, asker)
        if end is None:
            return answer.call.arguments
        left = end - GRACE - asyncio.get_running_loop().time()
        return answer.call.arguments | {"timeout": max(left, LEAST)}

    async def _outputs(self, answer: Answer, asker: Asker) -> list[Output]:
        call = answer.call
        try:
            async with asyncio.timeout_at(self._end(answer.request, asker)):
                outputs: list[Output] = await self.lm.agenerate(
                    call.prompts, call.method, **self._left(answer, asker)
                )
                return outputs
        except TimeoutError:
            self._aborted(len(call.prompts))
            raise of_ours(_late()) from None
        except ForetellError as error:
            raise self._refusal(error, answer) from error

    async def _scores(self, answer: Answer, asker: Asker) -> Scores | None:
        """Of the prompts, where they are to be echoed with their log-probabilities."""
        request, call = answer.request, answer.call
        if not isinstance(request, CompletionRequest):
            return None
        if not request.echo or request.logprobs is None:
            return None
        left = self._left(answer, asker)
        terms = {name: left[name] for name in ("tenant", "priority", "timeout") if name in left}
        asked = scoring(call.prompts[:: call.n], request.logprobs, **terms)
        try:
            outputs = await self.lm.agenerate(**asked)
        except ForetellError as error:
            raise of_ours(error) from error
        for output in outputs:
            if output.error is not None:
                raise of_ours(output.error)
        return [output.logprobs for output in outputs]

    async def _pieces(self, answer: Answer, asker: Asker) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices, counted."""
        call = answer.call
        unfinished = len(call.prompts)
        end = self._end(answer.request, asker)
        arguments = self._left(answer, asker)
        try:
            async with aclosing(self.lm.astream(call.prompts, call.method, **arguments)) as pieces:
                while unfinished:
                    async with asyncio.timeout_at(end):
                        piece = await anext(pieces)
                    if piece.finish_reason is not None:
                        unfinished -= 1
                        self._ended(answer, asker.key, piece.prompt, piece)
                    yield piece
        except TimeoutError:
            self._aborted(unfinished)
            raise of_ours(_late()) from None
        except ForetellError as error:
            raise self._refusal(error, answer) from error
        except (asyncio.CancelledError, GeneratorExit):
            self._aborted(unfinished)
            raise

    def _ended(self, answer: Answer, key: Key | None, index: int, last: Output | Piece) -> None:
        """Notes the end of the choice of this number; `last`: of it, or its last piece."""
        limit = answer.call.arguments["max_new_tokens"][index]
        self.metrics.answer(last.stats, str(last.finish_reason), limit)
        self.gate.answered(key, 1, last.stats.tokens if last.stats else 0)
        self._log_failure(last.error, answer)

    def _refusal(self, error: ForetellError, answer: Answer) -> ApiError:
        """What the client is told; of a form the field in which it was given."""
        self._log_failure(error, answer)
        refusal = of_ours(error)
        if refusal.param == "response_format" and answer.request.structured_outputs is not None:
            refusal.param = "structured_outputs"
        return refusal

    def _aborted(self, answers: int) -> None:
        for _ in range(answers):
            self.metrics.answer(None, "abort")

    def _log_failure(self, error: ForetellError | None, answer: Answer) -> None:
        """Of a request that broke, its cause: clients are not told."""
        if error is not None and of_ours(error).status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("%s failed: %s", answer.id, error, exc_info=error)


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the request was not done in the time it was given")
