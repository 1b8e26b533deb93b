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

from foretell.batch.prefixes import Group, group_prompts
from foretell.batch.requests import Prepared, full_error
from foretell.engine.prefix_cache import WORTH
from foretell.errors import ForetellError, first_message_line
from foretell.serve.errors import ApiError
from foretell.serve.schemas import CompletionRequest
from foretell.serve.scoring import scoring_call

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

    def expected(self, prepared: Prepared) -> int:
        """Tokens of one of its answers: until one is known, as many as there may be."""
        if not self.answers:
            return prepared.longest
        return min(prepared.longest, -(-self.tokens // self.answers))


class Room:
    """Shares of the limits that running requests hold. One request waits for room at a time."""

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


def group_batch(batch: Sequence[Prepared]) -> list[Group]:
    """The groups of a batch, in no order that matters."""
    return group_prompts([prepared.shared_beginning() for prepared in batch], min_tokens=WORTH)


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
        known_answers = -1
        while self.groups:
            if known_answers < 0 or self.lengths.answers >= 2 * max(1, known_answers):
                known_answers = self.lengths.answers
                self.groups.sort(key=self.rank)
            yield self.groups.pop()

    def rank(self, prompt_group: Group) -> tuple[int, float]:
        """Sort key of a group, of which the highest comes first."""
        members = [self.batch[member] for member in prompt_group.group_members]
        answers = prompts = 0
        for member in members:
            answers += self.lengths.expected(member) * len(member.call.prompts)
            prompts += sum(len(prompt) - prompt_group.prefix for prompt in member.call.prompts)
        return max(member.priority for member in members), answers / (prompt_group.prefix + prompts)

    def group_members(self, one: Group) -> list[Prepared]:
        """Requests of a group by priority, then those first that may take longest."""
        members = [self.batch[member] for member in one.group_members]
        return sorted(members, key=lambda member: (-member.priority, -member.longest))


async def run_batch(lm: LM, batch: Sequence[Prepared], limits: Limits, deliver: Deliver) -> Room:
    """Answers every request of a batch, and delivers each when it is done.

    Leaving it early, by an error of `deliver` or because its task is cancelled, ends what is
    running; nothing of that is delivered.
    """
    groups = group_batch(batch)
    limits = split_memory(lm, batch, groups, limits)
    lengths = Lengths()
    room = Room(limits)
    order = Order(groups, batch, lengths)
    try:
        async with asyncio.TaskGroup() as tasks:
            for prompt_group in order:
                for member_index, member in enumerate(order.group_members(prompt_group)):
                    known_tokens = (
                        prompt_group.prefix if member_index else 0
                    )  # the first one computes it
                    claim = expected_claim(lm, member, known_tokens, lengths)
                    await room.take(*claim)
                    tasks.create_task(_answer_request(lm, member, lengths, room, claim, deliver))
    except BaseExceptionGroup as errors:  # what went wrong first is what the user can cure
        raise errors.exceptions[0] from None
    return room


def split_memory(
    lm: LM, batch: Sequence[Prepared], groups: Sequence[Group], limits: Limits
) -> Limits:
    """Tells the engine what rows may take, those kept of prefixes with it; returns what is left to
    running requests.
    """
    prefix_bytes = 0
    if any(prompt_group.prefix for prompt_group in groups):
        text_lengths = [
            len(prompt) + prompt_group.longest
            for prompt_group in batch
            for prompt in prompt_group.call.prompts
        ]
        wanted_bytes = 4 * max(text_lengths) * lm.models["target"].row_bytes
        prefix_bytes = min(limits.memory // 2, wanted_bytes)
    memory = limits.memory - prefix_bytes
    lm.limit(memory=memory, requests=limits.requests, prefixes=prefix_bytes)
    return Limits(memory, limits.requests)


def expected_claim(
    lm: LM, prepared: Prepared, known_tokens: int, lengths: Lengths
) -> tuple[int, int]:
    """Bytes that a request is expected to take, and its number of texts.

    `known_tokens`: tokens of its prompt whose rows are there.
    """
    model_names = {"target", *lm.resolve(prepared.call.method)[1].models}
    row_bytes = sum(lm.models[name].row_bytes for name in model_names if name in lm.models)
    prompts = prepared.call.prompts
    expected_tokens = sum(len(prompt) - known_tokens for prompt in prompts)
    expected_tokens += lengths.expected(prepared) * len(prompts)
    return expected_tokens * row_bytes, len(prompts)


async def _answer_request(
    lm: LM,
    prepared: Prepared,
    lengths: Lengths,
    room: Room,
    claim: tuple[int, int],
    deliver: Deliver,
) -> None:
    try:
        answer = await _answer_body(lm, prepared, lengths)
    finally:
        room.give(*claim)
    deliver(prepared, answer)


async def _answer_body(lm: LM, prepared: Prepared, lengths: Lengths) -> dict[str, Any] | ApiError:
    """The answer's body, or why there is none: that is this request's alone, the others go on."""
    call = prepared.call
    try:
        outputs = check_outputs(await lm.agenerate(call.prompts, call.method, **call.arguments))
        scores = await _prompt_scores(lm, prepared)
        body = prepared.answer.full_answer(outputs, scores)
    except ApiError as error:
        return error
    except ForetellError as error:
        return full_error(error)
    except Exception as error:
        return ApiError(f"{type(error).__name__}: {first_message_line(error)}", None, "failed", 500)
    for output in outputs:
        lengths.add(len(output.tokens))
    return body


async def _prompt_scores(lm: LM, prepared: Prepared) -> list[list[Any]] | None:
    """Log-probabilities of the prompts, where `echo` and `logprobs` ask for them."""
    request = prepared.answer.request
    if not isinstance(request, CompletionRequest) or not request.echo or request.logprobs is None:
        return None
    prompts = prepared.call.prompts[:: prepared.call.n]
    outputs = check_outputs(await lm.agenerate(**scoring_call(prompts, request.logprobs)))
    return [output.logprobs or [] for output in outputs]


def check_outputs(outputs: list[Output]) -> list[Output]:
    """Returns the outputs as they are. Raises the error of the first that has one."""
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs
