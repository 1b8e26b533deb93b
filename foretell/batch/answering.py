"""From a file of requests to a file of results: what is left of them, on one model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.api.profiles import weights_digest
from foretell.batch.progress import Meter
from foretell.batch.requests import Item, Prepared, Requests, prepare
from foretell.batch.results import Results
from foretell.batch.running import Limits, run
from foretell.engine.cost_profile import numbers
from foretell.serve.errors import ApiError

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.serve.served import Served

TICK = 1.0  # seconds

# Called with the line of each request that is not answered, and why.
Tell = Callable[[int, ApiError], None]


def model_digest(lm: LM, method: str) -> str:
    """What results depend on besides the requests: weights, number format and method."""
    target = lm.models["target"]
    about = f"{weights_digest(target)} {numbers(target)} {method}"
    for name in sorted({*lm.models} - {"target", "draft"}):
        about += f" {name} {weights_digest(lm.models[name])}"
    return hashlib.sha256(about.encode()).hexdigest()


def rest(requests: Requests, results: Results, tell: Tell) -> list[Item]:
    """The requests without a result. Of lines that hold none it is written down."""
    for refused in requests.refused:
        if refused.line not in results.lines:
            results.refused(refused)
            tell(refused.line, refused.error)
    return [item for item in requests.items if item.line not in results.lines]


def prepare_rest(
    requests: Requests, results: Results, served: Served, method: str, tell: Tell
) -> list[Prepared]:
    """Of the requests without a result those that can run. Why others cannot is written down."""
    ready: list[Prepared] = []
    for item in rest(requests, results, tell):
        try:
            ready.append(prepare(item, served, method))
        except ApiError as error:
            results.broken(item, error)
            tell(item.line, error)
    return ready


@dataclass(frozen=True)
class Shared:
    """Prompt tokens of requests that were answered, and how many of them others had computed."""

    prompt_tokens: int
    reused: int

    @property
    def ratio(self) -> float:
        """1 - computed / all."""
        return self.reused / self.prompt_tokens if self.prompt_tokens else 0.0


def writer(
    results: Results, meter: Meter, tell: Tell
) -> Callable[[Item, dict[str, Any] | ApiError], None]:
    """What writes the result of an item, and counts it."""

    def write(item: Item, answer: dict[str, Any] | ApiError) -> None:
        if isinstance(answer, ApiError):
            results.broken(item, answer)
            tell(item.line, answer)
            meter.count(failed=True)
            return
        results.done(item, answer)
        usage = answer["usage"]
        meter.count(False, usage["completion_tokens"], usage["prompt_tokens"])

    return write


def answer(
    lm: LM,
    batch: Sequence[Prepared],
    results: Results,
    limits: Limits,
    meter: Meter,
    tick: Callable[[], None],
    tell: Tell,
) -> Shared:
    """Runs requests and writes their results, each as soon as it is there.

    `tick` is called about once a second. Raises KeyboardInterrupt where the user interrupts it.
    """
    write = writer(results, meter, tell)

    async def ticking() -> None:
        while True:
            await asyncio.sleep(TICK)
            results.sync()
            tick()

    async def whole() -> None:
        ticks = asyncio.create_task(ticking())
        try:
            await run(lm, batch, limits, lambda one, answer: write(one.item, answer))
        finally:
            ticks.cancel()

    before = lm.engine.status()["prefix_tokens_reused"]
    asyncio.run(whole())
    reused = lm.engine.status()["prefix_tokens_reused"] - before
    return Shared(meter.prompt_tokens, reused)
