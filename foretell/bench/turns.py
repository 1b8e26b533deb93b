"""The measurement itself: contenders take turns, prompt by prompt, in shuffled order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

from foretell.bench.contenders import Contender
from foretell.bench.figures import Tally, batch_speed, step_timeline
from foretell.bench.peers import Run
from foretell.bench.settings import Settings
from foretell.errors import ForetellError

# Seconds before a run where processes take turns: threads of the one before go on spinning for some
# milliseconds.
PAUSE = 0.02
REASON = 300  # characters of an error that are kept


def interleave(
    contenders: Sequence[Contender],
    batches: Sequence[list[list[int]]],
    settings: Settings,
    temperature: float,
    tell: Callable[[str], None] = lambda name: None,
) -> list[Tally]:
    """Runs every batch with every contender, `settings.rounds` times after a warm-up, which takes
    the first `settings.warm_up` prompts where that is not 0.

    Calls `tell(name)` after each run. A contender that raises is out of the group, with its reason;
    the others go on.
    """
    order_generator = random.Random(settings.seed)
    tallies = [Tally() for _ in contenders]
    for round_number in range(settings.rounds + 1):
        for contender in contenders:
            contender.forget()
        for batch_number, batch in enumerate(
            batches if round_number else warm_up_batches(batches, settings.warm_up)
        ):
            runs: dict[int, Sequence[Run]] = {}
            for contender_index in order_generator.sample(range(len(contenders)), len(contenders)):
                if not tallies[contender_index].failed:
                    if settings.peers:
                        time.sleep(PAUSE)
                    try:
                        runs[contender_index] = contenders[contender_index].run(
                            batch, settings.max_new_tokens, temperature, settings.seed
                        )
                    except Exception as error:  # a peer may raise anything; its cell alone is lost
                        tallies[contender_index].failed = one_line_reason(error)
                tell(contenders[contender_index].name)
            if round_number:
                _count_runs(contenders, tallies, runs, (round_number, batch_number))
    return tallies


def warm_up_batches(batches: Sequence[list[list[int]]], prompt_count: int) -> list[list[list[int]]]:
    """The batches of the warm-up: of this many prompts, or of all if 0."""
    if not prompt_count:
        return [*batches]
    batch_size = len(batches[0])
    warm_up_prompts = [prompt for batch in batches for prompt in batch][:prompt_count]
    return [
        warm_up_prompts[batch_start : batch_start + batch_size]
        for batch_start in range(0, len(warm_up_prompts), batch_size)
    ]


def _count_runs(
    contenders: Sequence[Contender],
    tallies: Sequence[Tally],
    runs: Mapping[int, Sequence[Run]],
    round_and_batch: tuple[int, int],
) -> None:
    """Adds the runs of one batch, by contender, to the tallies. `round_and_batch`: its key."""
    plain_index = None
    for contender_index, contender in enumerate(contenders):
        if contender.name == "plain":
            plain_index = contender_index
    for contender_index, batch_runs in runs.items():
        tally = tallies[contender_index]
        tally.speeds[round_and_batch] = batch_speed(batch_runs)
        tally.runs += batch_runs
        if not tally.timeline:
            tally.timeline = step_timeline(batch_runs[0])
        if plain_index is not None and plain_index in runs and contender_index != plain_index:
            for run, plain_run in zip(batch_runs, runs[plain_index], strict=True):
                tally.compare(round_and_batch[1], run, plain_run)


def one_line_reason(error: BaseException) -> str:
    """Returns an error's message in one line."""
    text = str(error) if isinstance(error, ForetellError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:REASON]
