"""Thresholds of a draft model's exits for a target: what `s2d` drafts by.

On answers of the target that the draft model did not learn from, each exit's best probability and
its agreement with the target are read at every token, by the rows of both models. What a forward of
each exit takes, with and without the others, is timed, as is the target's. Of all thresholds on a
grid, those are kept that promise the most tokens a second: of drafts that begin at any token, the
expected number of accepted tokens and one more, over the seconds of drafting and verifying. Tokens
count as at temperature 0 and at temperature 1, half each.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.model.exit_table import trained_exits, write_exit_table
from foretell.drafters.model.lazy_layers import LazyLayers
from foretell.errors import BadConfig
from foretell.ops.logits import resize_row
from foretell.train.answers import Text, read_texts

if TYPE_CHECKING:
    from foretell.api.lm import LM

GRID = tuple(step / 10 for step in range(10))  # thresholds that are tried
OUT = 2.0  # the threshold of an exit that is left out
MOST = 4  # exits whose thresholds are searched for
HELD_BACK = 32  # one of so many answers is for measuring, as in draft.py
WARM = 64  # tokens before a timed forward
ROUNDS = 15  # of timing
Tell = Callable[[str, int, int], None]


@dataclass
class Seen:
    """At every token of some answers: of each exit the probability of its best token, and the
    probability that the target accepts one, at temperature 0 and at 1; (exits, n). `starts`: of
    each answer.
    """

    chances: np.ndarray
    greedy: np.ndarray
    sampled: np.ndarray
    starts: list[int]


@dataclass
class Seconds:
    """`draft`: by the places of the exits in use, what a token's forward up to each of them takes
    after the one below; `target`: a verification of a whole draft.
    """

    draft: Mapping[tuple[int, ...], Sequence[float]]
    target: float


def held_back(files: Sequence[Path], window: int) -> Iterator[Text]:
    """The answers of these files that `foretell train draft` does not learn from."""
    texts = (text for file in files for text in read_texts(file) if window - text.prompt >= 8)
    return itertools.islice(texts, 0, None, HELD_BACK)


@torch.inference_mode()
def exit_rows(model: Model, text: Sequence[int], prompt: int) -> list[torch.Tensor]:
    """Rows (n, V) of the answer after `prompt` tokens, of each exit; of a model without exits
    those of its last layer.
    """
    answer_tree = TokenTree(int(text[prompt - 1])).chain(int(token) for token in text[prompt:-1])
    prompt_tokens = [int(token) for token in text[:prompt]]
    exits = model.exits if isinstance(model, LazyLayers) else (len(model.layout),)
    cache = model.cache()
    rows_by_exit = []
    for exit_layer in exits:
        layers = tuple(range(exit_layer)) if isinstance(model, LazyLayers) else None
        job, _ = cache.prepare(Ask(answer_tree, layers=layers), prompt_tokens, len(text))
        rows_by_exit.append(model.forward([job])[0].logits)
    return rows_by_exit


def look_at_answers(target: Model, draft: LazyLayers, texts: Iterable[Text], window: int) -> Seen:
    """Measures what the exits and the target say at the answers' tokens."""
    answer_parts: list[tuple[np.ndarray, ...]] = []
    starts, token_count = [], 0
    for text in texts:
        tokens = text.tokens[:window].tolist()
        if len(tokens) <= text.prompt or max(tokens) >= draft.vocab:
            continue
        (target_rows,) = exit_rows(target, tokens, text.prompt)
        p, best_tokens = target_rows.softmax(-1), target_rows.argmax(-1)
        exits = []
        for rows in exit_rows(draft, tokens, text.prompt):
            q = torch.stack([resize_row(row, target.vocab) for row in rows]).softmax(-1)
            chance, token = q.max(-1)
            exits.append(torch.stack([chance, token == best_tokens, torch.minimum(p, q).sum(-1)]))
        answer_parts.append(tuple(torch.stack(exits, 1).double().cpu().numpy()))
        starts.append(token_count)
        token_count += len(p)
    if not answer_parts:
        raise BadConfig("there are no answers to measure on; give a folder with some more")
    chances, greedy, sampled = (
        np.concatenate(arrays, 1) for arrays in zip(*answer_parts, strict=True)
    )
    return Seen(chances, greedy, sampled, starts)


def promised_speed(
    measured: Seen, seconds: Seconds, thresholds: Sequence[float], length: int
) -> tuple[float, float, float, list[float]]:
    """(tokens a second, tokens a step at temperature 0, at 1, share of tokens by exit) of drafts of
    `length` tokens.

    `thresholds`: of the exits but the last; above 1: it is left out.
    """
    last_exit = len(measured.chances) - 1
    used_exits = [*(place for place in range(last_exit) if thresholds[place] <= 1), last_exit]
    chosen_exits = np.full(measured.chances.shape[1], last_exit)
    for place in reversed(used_exits[:-1]):
        chosen_exits = np.where(measured.chances[place] >= thresholds[place], place, chosen_exits)
    spent_seconds = np.cumsum(seconds.draft[tuple(used_exits)])
    seconds_to = dict(zip(used_exits, spent_seconds, strict=True))
    draft_seconds = length * float(np.mean([seconds_to[place] for place in chosen_exits]))
    token_numbers = np.arange(len(chosen_exits))
    greedy = 1 + mean_accepted(
        measured.greedy[chosen_exits, token_numbers], measured.starts, length
    )
    sampled = 1 + mean_accepted(
        measured.sampled[chosen_exits, token_numbers], measured.starts, length
    )
    shares = [float(np.mean(chosen_exits == place)) for place in range(last_exit + 1)]
    return (greedy + sampled) / 2 / (draft_seconds + seconds.target), greedy, sampled, shares


def mean_accepted(agreements: np.ndarray, starts: Sequence[int], length: int) -> float:
    """The mean number of tokens of a draft that are accepted, over the places where a whole one
    fits: `agreements` (n,) are the probabilities of each token, if those before it are.
    """
    accepted_sum, window_count = 0.0, 0
    for start, end in zip(starts, [*starts[1:], len(agreements)], strict=True):
        if end - start >= length:
            windows = np.lib.stride_tricks.sliding_window_view(agreements[start:end], length)
            accepted_sum += float(np.cumprod(windows, 1).sum())
            window_count += len(windows)
    return accepted_sum / max(1, window_count)


def threshold_grid(exits: int) -> Iterator[tuple[float, ...]]:
    """All thresholds that are tried for the exits but the last."""
    return itertools.product((*GRID, OUT), repeat=exits - 1)


def best_thresholds(measured: Seen, seconds: Seconds, length: int) -> tuple[float, ...]:
    """The thresholds of most tokens a second; of equal ones the first, which drafts lowest."""
    return max(
        threshold_grid(len(measured.chances)),
        key=lambda thresholds: promised_speed(measured, seconds, thresholds, length)[0],
    )


def time_forwards(target: Model, draft: Model, exits: Sequence[int], length: int) -> Seconds:
    """Times forwards of the exits and of the target here; medians."""
    draft_seconds = {}
    last_exit = len(exits) - 1
    for count in range(last_exit + 1):
        for early_exits in itertools.combinations(range(last_exit), count):
            used_exits = (*early_exits, last_exit)
            model = LazyLayers(draft, [exits[place] for place in used_exits], "s2d")
            draft_seconds[used_exits] = _forward_seconds(model, model.exits, 1)
    (verifying,) = _forward_seconds(target, (None,), length + 1)
    return Seconds(draft_seconds, verifying)


@torch.inference_mode()
def _forward_seconds(model: Model, exits: Sequence[int | None], size: int) -> list[float]:
    """Seconds of a forward of `size` tokens up to each exit, after the one below."""
    text_tokens = [1] * WARM
    cache = model.cache()
    timings: list[list[float]] = [[] for _ in exits]
    for round_number in range(ROUNDS + 1):
        tree = TokenTree(1).chain(range(2, size + 1))
        for exit_number, exit_layer in enumerate(exits):
            layers = None if exit_layer is None else tuple(range(exit_layer))
            ask = Ask(tree, rows=range(size), layers=layers)
            job, _ = cache.prepare(ask, text_tokens, WARM)
            start = time.perf_counter()
            model.forward([job])
            if round_number:  # the first one reads the text
                timings[exit_number].append(time.perf_counter() - start)
        text_tokens = [*text_tokens, 1]
    return [statistics.median(seconds) for seconds in timings]


def calibrate_exits(
    lm: LM,
    files: Sequence[Path],
    folder: Path,
    length: int = 4,
    window: int = 640,
    max_answers: int = 64,
    name: str = "",
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Finds the thresholds for `lm`'s target and draft model, writes them into the draft model's
    `folder`, and returns what stands there. `max_answers`: answers that are measured on.

    Raises BadConfig where the draft model has no exits, or too many.
    """
    target, draft = lm.models["target"], lm.models["draft"]
    exit_table = trained_exits(draft)
    if exit_table is None or not 2 <= len(exit_table.layers) <= MOST:
        exit_text = "no exits" if exit_table is None else f"{len(exit_table.layers)} exits"
        raise BadConfig(
            f"{folder}: {draft.name} has {exit_text}, and 2 to {MOST} are needed; "
            "train it with `foretell train draft --exits`"
        )
    texts = list(itertools.islice(held_back(files, window), max_answers))

    def noted() -> Iterator[Text]:
        for number, text in enumerate(texts):
            if tell is not None:
                tell("reading answers", number, len(texts))
            yield text

    measured = look_at_answers(target, LazyLayers(draft, exit_table.layers, "s2d"), noted(), window)
    seconds = time_forwards(target, draft, exit_table.layers, length)
    thresholds = best_thresholds(measured, seconds, length)
    record: dict[str, Any] = {"thresholds": list(thresholds), "length": length}
    deepest = (OUT,) * (len(exit_table.layers) - 1)
    for key, tried_thresholds in (("found", thresholds), ("last_exit", deepest)):
        speed, greedy, sampled, shares = promised_speed(measured, seconds, tried_thresholds, length)
        numbers = {"tokens_per_s": speed, "greedy": greedy, "drawn": sampled}
        record[key] = {part: round(value, 4) for part, value in numbers.items()}
        if key == "found":
            record["shares"] = [round(share, 4) for share in shares]
    write_exit_table(folder, target, name or target.name, record)
    return record
