"""The measurement itself: contenders take turns, prompt by prompt, in shuffled order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

from foretell.bench.contenders import Contender
from foretell.bench.figures import Tally, speed, timeline
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
    order = random.Random(settings.seed)
    tallies = [Tally() for _ in contenders]
    for turn in range(settings.rounds + 1):
        for contender in contenders:
            contender.forget()
        for number, batch in enumerate(batches if turn else warming(batches, settings.warm_up)):
            runs: dict[int, Sequence[Run]] = {}
            for i in order.sample(range(len(contenders)), len(contenders)):
                if not tallies[i].failed:
                    if settings.peers:
                        time.sleep(PAUSE)
                    try:
                        runs[i] = contenders[i].run(
                            batch, settings.max_new_tokens, temperature, settings.seed
                        )
                    except Exception as error:  # a peer may raise anything; its cell alone is lost
                        tallies[i].failed = reason(error)
                tell(contenders[i].name)
            if turn:
                _count(contenders, tallies, runs, (turn, number))
    return tallies


def warming(batches: Sequence[list[list[int]]], prompts: int) -> list[list[list[int]]]:
    """The batches of the warm-up: of this many prompts, or of all if 0."""
    if not prompts:
        return [*batches]
    size = len(batches[0])
    first = [prompt for batch in batches for prompt in batch][:prompts]
    return [first[start : start + size] for start in range(0, len(first), size)]


def _count(
    contenders: Sequence[Contender],
    tallies: Sequence[Tally],
    runs: Mapping[int, Sequence[Run]],
    key: tuple[int, int],
) -> None:
    """Adds the runs of one batch, by contender, to the tallies. `key`: the round and the batch."""
    plain = None
    for i, contender in enumerate(contenders):
        if contender.name == "plain":
            plain = i
    for i, batch_runs in runs.items():
        tally = tallies[i]
        tally.speeds[key] = speed(batch_runs)
        tally.runs += batch_runs
        if not tally.timeline:
            tally.timeline = timeline(batch_runs[0])
        if plain is not None and plain in runs and i != plain:
            for run, reference in zip(batch_runs, runs[plain], strict=True):
                tally.compare(key[1], run, reference)


def reason(error: BaseException) -> str:
    """What an error says, in one line."""
    text = str(error) if isinstance(error, ForetellError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:REASON]
