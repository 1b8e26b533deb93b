"""Answers that a user gets: whole answers, and the pieces of a streamed one."""

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
    """An answer. If its request failed, `error` is set, and the text is what there was by then."""

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
    # What follows the prompt for now, where a method fills it out of order: the places that
    # changed, from 0 on, each with its token, None: masked again. What is final in `tokens` too.
    placed: list[tuple[int, int | None]] = field(default_factory=list)
    length: int | None = None  # places that there are, told with `placed`
    # On the last piece, what else its method found, with scores: other samples or beams.
    others: list[Output] = field(default_factory=list)


def raise_failed(output: Output) -> Output:
    """Returns the output, or raises its first failed sample's error, which holds what there is."""
    for sample in output.samples:
        if sample.error is not None:
            sample.error.output = output
            raise sample.error
    return output


def refused_pieces(prompts: Sequence[object]) -> list[Piece]:
    """The only pieces of those prompts that cannot be used: of each its error."""
    pieces = []
    for i, prompt_error in enumerate(prompts):
        if isinstance(prompt_error, ForetellError):
            pieces.append(Piece("", [], [], i, "error", error=prompt_error))
    return pieces


class Stream:
    """Turns the events of one request into pieces."""

    def __init__(self, live_request: Live, prompt: int, decode: Decode):
        self.live = live_request
        self.prompt = prompt
        self.decode = decode
        self.detokenizer = live_request.ctx.sampler.detokenizer(decode)
        self.told = 0  # tokens that pieces have carried

    def piece(self, event: Event) -> Piece:
        parts = []
        for token in event.tokens:
            parts.append(self.detokenizer.push(text_tokens(self.live, [token])))
        piece = Piece("".join(parts), event.tokens, event.sources, self.prompt, parts=parts)
        piece.logprobs = _output_logprobs(self.live, event.tokens, self.told)
        piece.step = self._find_step(len(event.tokens))
        piece.placed, piece.length = list(event.placed), event.length
        self.told += len(event.tokens)
        if event.done is not None:  # from here on the engine leaves the request alone
            piece.text += self.detokenizer.push([], final=True)
            piece.finish_reason = event.done
            piece.error = request_failure(self.live)
            piece.stats = self.live.ctx.stats
            piece.others = (
                list_outputs(self.live, [], self.decode)[1:] if piece.error is None else []
            )
        return piece

    def _find_step(self, tokens: int) -> TraceStep | None:
        """The step that so many new tokens came from, if the request is traced."""
        request = self.live.ctx.request
        if not isinstance(request.trace, Steps):
            return None
        last_step = None
        end = len(request.prompt) + self.told + tokens
        while request.trace and request.trace[0].position < end:
            last_step = request.trace.popleft()
        return last_step


def request_failure(live_request: Live) -> ForetellError | None:
    """Why a finished request failed. What is no error of ours (an interruption) is raised."""
    if live_request.error is None or isinstance(live_request.error, ForetellError):
        return live_request.error
    raise live_request.error


def list_outputs(live_request: Live, sources: list[str], decode: Decode) -> list[Output]:
    """A finished request's result, and after it what else its method found."""
    ctx = live_request.ctx
    result = Output(
        _decode_text(live_request, ctx.output, decode),
        ctx.output,
        live_request.reason or "error",
        ctx.stats,
        sources,
        _output_logprobs(live_request, ctx.output),
        error=request_failure(live_request),
    )
    found_outputs = [result]
    if live_request.answers:
        result.score = live_request.answers[0][1]
    for tokens, score, reason in live_request.answers[1:]:
        text = _decode_text(live_request, tokens, decode)
        token_sources = ["target"] * len(tokens)
        found_outputs.append(Output(text, tokens, reason, ctx.stats, token_sources, score=score))
    return found_outputs


def text_tokens(live_request: Live, tokens: Sequence[int]) -> list[int]:
    """The tokens that are text, without those that end it."""
    return [token for token in tokens if token not in live_request.ctx.sampler.stops]


def _decode_text(live_request: Live, tokens: Sequence[int], decode: Decode) -> str:
    return live_request.ctx.sampler.detokenizer(decode).push(
        text_tokens(live_request, tokens), final=True
    )


def _output_logprobs(
    live_request: Live, tokens: Sequence[int], start: int = 0
) -> list[dict[str, Any]] | None:
    """Log-probabilities of tokens of the result, the first with `start` others before it."""
    if live_request.ctx.request.sampling.logprobs is None:
        return None
    entries = []
    numbers = live_request.logprobs[start : start + len(tokens)]
    for token, (value, best_tokens) in zip(tokens, numbers, strict=True):
        top = [{"token": other_token, "logprob": number} for other_token, number in best_tokens]
        entries.append({"token": token, "logprob": value, "top": top})
    return entries
