"""What a user gets: whole answers, and the pieces of a streamed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.core.request import Event
from foretell.core.stats import Stats
from foretell.core.tracing import Steps, TraceStep
from foretell.engine.live import Live
from foretell.errors import ForetellError

Decode = Callable[[Sequence[int]], str]


@dataclass
class Output:
    """One answer. If its request failed, `error` is set, and the text is what there was by then."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop", "length" or "error"
    stats: Stats
    draft: list[str] = field(default_factory=list)  # of each token who proposed it
    logprobs: list[dict[str, Any]] | None = None
    samples: list[Output] = field(default_factory=list)  # all n of this prompt, this one first
    score: float | None = None  # of this answer, where a method finds several
    error: ForetellError | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "draft": self.draft,
            "logprobs": self.logprobs,
            "stats": self.stats.to_dict(),
            "error": str(self.error) if self.error else None,
            "score": self.score,
        }


@dataclass
class Piece:
    """A part of an answer, while it is made."""

    text: str  # all of `parts`, and at the end what was held back
    tokens: list[int]
    draft: list[str]  # of each token who proposed it
    prompt: int = 0  # which of the prompts it answers
    finish_reason: str | None = None  # on the last piece of an answer
    parts: list[str] = field(default_factory=list)  # the text that each token made certain
    error: ForetellError | None = None
    stats: Stats | None = None  # on the last piece of an answer
    logprobs: list[dict[str, Any]] | None = None  # of each token, as in an Output
    step: TraceStep | None = None  # with trace=True: the step that the tokens came from
    # What stands behind the prompt for now, where a method fills it out of order: the places that
    # changed, from 0 on, each with its token, None: masked again. What is final in `tokens` too.
    placed: list[tuple[int, int | None]] = field(default_factory=list)
    length: int | None = None  # places that there are, told with `placed`
    # On the last piece, what else its method found, with scores: other samples or beams.
    others: list[Output] = field(default_factory=list)


def whole(output: Output) -> Output:
    """The same. Raises the error of the first sample that failed, which holds what there is."""
    for sample in output.samples:
        if sample.error is not None:
            sample.error.output = output
            raise sample.error
    return output


def refused(prompts: Sequence[object]) -> list[Piece]:
    """The only pieces of those prompts that cannot be used: of each its error."""
    pieces = []
    for i, found in enumerate(prompts):
        if isinstance(found, ForetellError):
            pieces.append(Piece("", [], [], i, "error", error=found))
    return pieces


class Stream:
    """Turns the events of one request into pieces."""

    def __init__(self, live: Live, prompt: int, decode: Decode):
        self.live = live
        self.prompt = prompt
        self.decode = decode
        self.detokenizer = live.ctx.sampler.detokenizer(decode)
        self.told = 0  # tokens that pieces have carried

    def piece(self, event: Event) -> Piece:
        parts = []
        for token in event.tokens:
            parts.append(self.detokenizer.push(spoken(self.live, [token])))
        piece = Piece("".join(parts), event.tokens, event.sources, self.prompt, parts=parts)
        piece.logprobs = _logprobs(self.live, event.tokens, self.told)
        piece.step = self._step(len(event.tokens))
        piece.placed, piece.length = list(event.placed), event.length
        self.told += len(event.tokens)
        if event.done is not None:  # from here on the engine leaves the request alone
            piece.text += self.detokenizer.push([], final=True)
            piece.finish_reason = event.done
            piece.error = failure(self.live)
            piece.stats = self.live.ctx.stats
            piece.others = outputs(self.live, [], self.decode)[1:] if piece.error is None else []
        return piece

    def _step(self, tokens: int) -> TraceStep | None:
        """The step that so many new tokens came from, if the request is traced."""
        request = self.live.ctx.request
        if not isinstance(request.trace, Steps):
            return None
        found = None
        end = len(request.prompt) + self.told + tokens
        while request.trace and request.trace[0].position < end:
            found = request.trace.popleft()
        return found


def failure(live: Live) -> ForetellError | None:
    """Why a finished request failed. What is no error of ours (an interruption) is raised."""
    if live.error is None or isinstance(live.error, ForetellError):
        return live.error
    raise live.error


def outputs(live: Live, sources: list[str], decode: Decode) -> list[Output]:
    """A finished request's result, and after it what else its method found."""
    ctx = live.ctx
    result = Output(
        _text(live, ctx.output, decode),
        ctx.output,
        live.reason or "error",
        ctx.stats,
        sources,
        _logprobs(live, ctx.output),
        error=failure(live),
    )
    found = [result]
    if live.answers:
        result.score = live.answers[0][1]
    for tokens, score, reason in live.answers[1:]:
        text = _text(live, tokens, decode)
        drafted = ["target"] * len(tokens)
        found.append(Output(text, tokens, reason, ctx.stats, drafted, score=score))
    return found


def spoken(live: Live, tokens: Sequence[int]) -> list[int]:
    """The tokens that are text, without those that end it."""
    return [token for token in tokens if token not in live.ctx.sampler.stops]


def _text(live: Live, tokens: Sequence[int], decode: Decode) -> str:
    return live.ctx.sampler.detokenizer(decode).push(spoken(live, tokens), final=True)


def _logprobs(live: Live, tokens: Sequence[int], start: int = 0) -> list[dict[str, Any]] | None:
    """Of these tokens of the result, the first of which has `start` others before it."""
    if live.ctx.request.sampling.logprobs is None:
        return None
    entries = []
    numbers = live.logprobs[start : start + len(tokens)]
    for token, (value, best) in zip(tokens, numbers, strict=True):
        top = [{"token": other, "logprob": number} for other, number in best]
        entries.append({"token": token, "logprob": value, "top": top})
    return entries
