"""From a file of requests to a file of results: what is left of them, on one model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.api.profiles import weights_digest
from foretell.batch.progress import Meter
from foretell.batch.requests import Item, Prepared, Requests, prepare_item
from foretell.batch.results import Results
from foretell.batch.running import Limits, run_batch
from foretell.engine.cost_profile import number_format
from foretell.serve.errors import ApiError

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.serve.served import Served

TICK = 1.0  # seconds

# Called with the line of each request that is not answered, and why.
Tell = Callable[[int, ApiError], None]


def model_digest(lm: LM, method: str) -> str:
    """Digest of what results depend on besides requests: weights, number format and method."""
    target = lm.models["target"]
    description = f"{weights_digest(target)} {number_format(target)} {method}"
    for name in sorted({*lm.models} - {"target", "draft"}):
        description += f" {name} {weights_digest(lm.models[name])}"
    return hashlib.sha256(description.encode()).hexdigest()


def list_pending(requests: Requests, results: Results, tell: Tell) -> list[Item]:
    """Returns the requests without a result, and writes down lines that hold no request."""
    for refused_line in requests.refused_lines:
        if refused_line.line not in results.lines:
            results.write_refused(refused_line)
            tell(refused_line.line, refused_line.error)
    return [item for item in requests.items if item.line not in results.lines]


def prepare_pending(
    requests: Requests, results: Results, served: Served, method: str, tell: Tell
) -> list[Prepared]:
    """Returns the requests without a result that can run, and writes down why others cannot."""
    prepared_items: list[Prepared] = []
    for item in list_pending(requests, results, tell):
        try:
            prepared_items.append(prepare_item(item, served, method))
        except ApiError as error:
            results.broken(item, error)
            tell(item.line, error)
    return prepared_items


@dataclass(frozen=True)
class Shared:
    """Prompt tokens of requests that were answered, and how many of them others had computed."""

    prompt_tokens: int
    reused: int

    @property
    def ratio(self) -> float:
        """1 - computed / all."""
        return self.reused / self.prompt_tokens if self.prompt_tokens else 0.0


def result_writer(
    results: Results, meter: Meter, tell: Tell
) -> Callable[[Item, dict[str, Any] | ApiError], None]:
    """Returns a function that writes the result of an item, and counts it."""

    def write(item: Item, answer: dict[str, Any] | ApiError) -> None:
        if isinstance(answer, ApiError):
            results.broken(item, answer)
            tell(item.line, answer)
            meter.count(failed=True)
            return
        results.write_answer(item, answer)
        usage = answer["usage"]
        meter.count(False, usage["completion_tokens"], usage["prompt_tokens"])

    return write


def answer_batch(
    lm: LM,
    prepared_items: Sequence[Prepared],
    results: Results,
    limits: Limits,
    meter: Meter,
    tick: Callable[[], None],
    tell: Tell,
) -> Shared:
    """Runs requests and writes their results, each as soon as it is there.

    `tick` is called about once a second. Raises KeyboardInterrupt where the user interrupts it.
    """
    write_result = result_writer(results, meter, tell)

    async def ticking() -> None:
        while True:
            await asyncio.sleep(TICK)
            results.sync()
            tick()

    async def whole() -> None:
        ticks = asyncio.create_task(ticking())
        try:
            await run_batch(
                lm, prepared_items, limits, lambda one, answer: write_result(one.item, answer)
            )
        finally:
            ticks.cancel()

    reused_before = lm.engine.status()["prefix_tokens_reused"]
    asyncio.run(whole())
    reused_tokens = lm.engine.status()["prefix_tokens_reused"] - reused_before
    return Shared(meter.prompt_tokens, reused_tokens)
