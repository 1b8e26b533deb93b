"""Runs a batch: groups of requests one after the other, as many at once as memory holds.

Requests with a common prefix begin one after the other, so that the engine, which keeps rows of
texts for others that begin so, has them when the next one comes. Groups whose answers are long for
their prompts come first: what later groups compute of prompts then shares forwards with their
steps. How long an answer becomes is not known; what answers had on average so far stands for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.batch.prefixes import Group, group
from foretell.batch.requests import Prepared, in_full
from foretell.engine.prefix_cache import WORTH
from foretell.errors import ForetellError, first_line
from foretell.serve.errors import ApiError
from foretell.serve.schemas import CompletionRequest
from foretell.serve.scoring import scoring

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.api.outputs import Output

# Called with each request when it is done: its answer's body, or why it has none.
Deliver = Callable[[Prepared, "dict[str, Any] | ApiError"], None]


@dataclass(frozen=True)
class Limits:
    """`memory`: bytes that all cache rows may take; `requests`: how many texts run at once."""

    memory: int
    requests: int


class Lengths:
    """How many tokens answers have, on average so far."""

    def __init__(self) -> None:
        self.answers = 0
        self.tokens = 0

    def add(self, tokens: int) -> None:
        self.answers += 1
        self.tokens += tokens

    def expected(self, one: Prepared) -> int:
        """Tokens of one of its answers: until one is known, as many as there may be."""
        if not self.answers:
            return one.longest
        return min(one.longest, -(-self.tokens // self.answers))


class Room:
    """What running requests hold of the limits. One waits for room at a time."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.memory = 0
        self.requests = 0
        self.most = 0  # bytes that were projected at any time
        self._freed = asyncio.Event()

    async def take(self, memory: int, requests: int) -> None:
        """Returns when there is room. What is larger than all of it runs alone."""
        while self.requests and not self._fits(memory, requests):
            self._freed.clear()
            await self._freed.wait()
        self.memory += memory
        self.requests += requests
        self.most = max(self.most, self.memory)

    def _fits(self, memory: int, requests: int) -> bool:
        within = self.memory + memory <= self.limits.memory
        return within and self.requests + requests <= self.limits.requests

    def give(self, memory: int, requests: int) -> None:
        self.memory -= memory
        self.requests -= requests
        self._freed.set()


def grouped(batch: Sequence[Prepared]) -> list[Group]:
    """The groups of a batch, in no order that matters."""
    return group([one.beginning() for one in batch], least=WORTH)


class Order:
    """The order of groups: by priority, then by tokens of answers for each token of prompts."""

    def __init__(self, groups: Sequence[Group], batch: Sequence[Prepared], lengths: Lengths):
        self.groups = list(groups)
        self.batch = batch
        self.lengths = lengths

    def __iter__(self) -> Iterator[Group]:
        """The groups. What is expected of answers is looked at again when twice as many are
        known.
        """
        known = -1
        while self.groups:
            if known < 0 or self.lengths.answers >= 2 * max(1, known):
                known = self.lengths.answers
                self.groups.sort(key=self.rank)
            yield self.groups.pop()

    def rank(self, one: Group) -> tuple[int, float]:
        """Higher ones come first."""
        members = [self.batch[member] for member in one.members]
        answers = prompts = 0
        for member in members:
            answers += self.lengths.expected(member) * len(member.call.prompts)
            prompts += sum(len(prompt) - one.prefix for prompt in member.call.prompts)
        return max(member.priority for member in members), answers / (one.prefix + prompts)

    def members(self, one: Group) -> list[Prepared]:
        """Of a group: by priority, then those first that may take longest."""
        members = [self.batch[member] for member in one.members]
        return sorted(members, key=lambda member: (-member.priority, -member.longest))


async def run(lm: LM, batch: Sequence[Prepared], limits: Limits, deliver: Deliver) -> Room:
    """Answers every request of a batch, and delivers each when it is done.

    Leaving it early, by an error of `deliver` or because its task is cancelled, ends what is
    running; nothing of that is delivered.
    """
    groups = grouped(batch)
    limits = share(lm, batch, groups, limits)
    lengths = Lengths()
    room = Room(limits)
    order = Order(groups, batch, lengths)
    try:
        async with asyncio.TaskGroup() as tasks:
            for one in order:
                for place, member in enumerate(order.members(one)):
                    known = one.prefix if place else 0  # the first one computes it
                    claim = claimed(lm, member, known, lengths)
                    await room.take(*claim)
                    tasks.create_task(_answer(lm, member, lengths, room, claim, deliver))
    except BaseExceptionGroup as errors:  # what went wrong first is what the user can cure
        raise errors.exceptions[0] from None
    return room


def share(lm: LM, batch: Sequence[Prepared], groups: Sequence[Group], limits: Limits) -> Limits:
    """Tells the engine what rows may take, those kept of prefixes with it; returns what is left to
    running requests.
    """
    prefixes = 0
    if any(one.prefix for one in groups):
        texts = [len(prompt) + one.longest for one in batch for prompt in one.call.prompts]
        wanted = 4 * max(texts) * lm.models["target"].row_bytes
        prefixes = min(limits.memory // 2, wanted)
    memory = limits.memory - prefixes
    lm.limit(memory=memory, requests=limits.requests, prefixes=prefixes)
    return Limits(memory, limits.requests)


def claimed(lm: LM, one: Prepared, known: int, lengths: Lengths) -> tuple[int, int]:
    """Bytes that a request is expected to take, and its number of texts.

    `known`: tokens of its prompt whose rows are there.
    """
    names = {"target", *lm.resolve(one.call.method)[1].models}
    row = sum(lm.models[name].row_bytes for name in names if name in lm.models)
    prompts = one.call.prompts
    tokens = sum(len(prompt) - known for prompt in prompts)
    tokens += lengths.expected(one) * len(prompts)
    return tokens * row, len(prompts)


async def _answer(
    lm: LM,
    one: Prepared,
    lengths: Lengths,
    room: Room,
    claim: tuple[int, int],
    deliver: Deliver,
) -> None:
    try:
        answer = await _body(lm, one, lengths)
    finally:
        room.give(*claim)
    deliver(one, answer)


async def _body(lm: LM, one: Prepared, lengths: Lengths) -> dict[str, Any] | ApiError:
    """The answer's body, or why there is none: that is this request's alone, the others go on."""
    call = one.call
    try:
        outputs = sound(await lm.agenerate(call.prompts, call.method, **call.arguments))
        scores = await _scores(lm, one)
        body = one.answer.whole(outputs, scores)
    except ApiError as error:
        return error
    except ForetellError as error:
        return in_full(error)
    except Exception as error:
        return ApiError(f"{type(error).__name__}: {first_line(error)}", None, "failed", 500)
    for output in outputs:
        lengths.add(len(output.tokens))
    return body


async def _scores(lm: LM, one: Prepared) -> list[list[Any]] | None:
    """Log-probabilities of the prompts, where `echo` and `logprobs` ask for them."""
    request = one.answer.request
    if not isinstance(request, CompletionRequest) or not request.echo or request.logprobs is None:
        return None
    prompts = one.call.prompts[:: one.call.n]
    outputs = sound(await lm.agenerate(**scoring(prompts, request.logprobs)))
    return [output.logprobs or [] for output in outputs]


def sound(outputs: list[Output]) -> list[Output]:
    """The same. Raises the error of the first that has one."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs
