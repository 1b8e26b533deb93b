"""Thresholds of a draft model's exits for a target: what `s2d` drafts by.

On answers of the target that the draft model did not learn from, each exit's best chance and its
agreement with the target are read at every token, by the rows of both models. What a forward of
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
from foretell.drafters.model.exit_table import keep, trained
from foretell.drafters.model.lazy_layers import LazyLayers
from foretell.errors import BadConfig
from foretell.ops.logits import resized
from foretell.train.answers import Text, read

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
    """At every token of some answers: of each exit the chance of its best token, and the chance
    that the target accepts one, at temperature 0 and at 1; (exits, n). `starts`: of each answer.
    """

    chances: np.ndarray
    greedy: np.ndarray
    drawn: np.ndarray
    starts: list[int]


@dataclass
class Seconds:
    """`draft`: by the places of the exits in use, what a token's forward up to each of them takes
    behind the one below; `target`: a verification of a whole draft.
    """

    draft: Mapping[tuple[int, ...], Sequence[float]]
    target: float


def held_back(files: Sequence[Path], window: int) -> Iterator[Text]:
    """The answers of these files that `foretell train draft` does not learn from."""
    texts = (text for file in files for text in read(file) if window - text.prompt >= 8)
    return itertools.islice(texts, 0, None, HELD_BACK)


@torch.inference_mode()
def rows_of(model: Model, text: Sequence[int], prompt: int) -> list[torch.Tensor]:
    """Of each exit, of a model without any the last one, the rows (n, V) of the answer behind so
    many tokens of prompt.
    """
    tree = TokenTree(int(text[prompt - 1])).chain(int(token) for token in text[prompt:-1])
    before = [int(token) for token in text[:prompt]]
    exits = model.exits if isinstance(model, LazyLayers) else (len(model.layout),)
    cache = model.cache()
    found = []
    for exit_layer in exits:
        layers = tuple(range(exit_layer)) if isinstance(model, LazyLayers) else None
        job, _ = cache.prepare(Ask(tree, layers=layers), before, len(text))
        found.append(model.forward([job])[0].logits)
    return found


def look(target: Model, draft: LazyLayers, texts: Iterable[Text], window: int) -> Seen:
    """What the exits and the target say at the answers' tokens."""
    parts: list[tuple[np.ndarray, ...]] = []
    starts, size = [], 0
    for text in texts:
        tokens = text.tokens[:window].tolist()
        if len(tokens) <= text.prompt or max(tokens) >= draft.vocab:
            continue
        (said,) = rows_of(target, tokens, text.prompt)
        p, best = said.softmax(-1), said.argmax(-1)
        exits = []
        for rows in rows_of(draft, tokens, text.prompt):
            q = torch.stack([resized(row, target.vocab) for row in rows]).softmax(-1)
            chance, token = q.max(-1)
            exits.append(torch.stack([chance, token == best, torch.minimum(p, q).sum(-1)]))
        parts.append(tuple(torch.stack(exits, 1).double().cpu().numpy()))
        starts.append(size)
        size += len(p)
    if not parts:
        raise BadConfig("there are no answers to measure on; give a folder with some more")
    chances, greedy, drawn = (np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True))
    return Seen(chances, greedy, drawn, starts)


def promise(
    seen: Seen, seconds: Seconds, thresholds: Sequence[float], length: int
) -> tuple[float, float, float, list[float]]:
    """(tokens a second, tokens a step at temperature 0, at 1, share of tokens by exit) of drafts of
    `length` tokens.

    `thresholds`: of the exits but the last; above 1: it is left out.
    """
    last = len(seen.chances) - 1
    used = [*(place for place in range(last) if thresholds[place] <= 1), last]
    chosen = np.full(seen.chances.shape[1], last)
    for place in reversed(used[:-1]):
        chosen = np.where(seen.chances[place] >= thresholds[place], place, chosen)
    spent = np.cumsum(seconds.draft[tuple(used)])
    taken = dict(zip(used, spent, strict=True))
    drafting = length * float(np.mean([taken[place] for place in chosen]))
    here = np.arange(len(chosen))
    greedy = 1 + accepted(seen.greedy[chosen, here], seen.starts, length)
    drawn = 1 + accepted(seen.drawn[chosen, here], seen.starts, length)
    shares = [float(np.mean(chosen == place)) for place in range(last + 1)]
    return (greedy + drawn) / 2 / (drafting + seconds.target), greedy, drawn, shares


def accepted(agreed: np.ndarray, starts: Sequence[int], length: int) -> float:
    """The mean number of tokens of a draft that are accepted, over the places where a whole one
    fits: `agreed` (n,) are the chances of each token, if those before it are.
    """
    total, count = 0.0, 0
    for start, end in zip(starts, [*starts[1:], len(agreed)], strict=True):
        if end - start >= length:
            windows = np.lib.stride_tricks.sliding_window_view(agreed[start:end], length)
            total += float(np.cumprod(windows, 1).sum())
            count += len(windows)
    return total / max(1, count)


def choices(exits: int) -> Iterator[tuple[float, ...]]:
    """All thresholds that are tried for the exits but the last."""
    return itertools.product((*GRID, OUT), repeat=exits - 1)


def best(seen: Seen, seconds: Seconds, length: int) -> tuple[float, ...]:
    """The thresholds of most tokens a second; of equal ones the first, which drafts lowest."""
    return max(choices(len(seen.chances)), key=lambda one: promise(seen, seconds, one, length)[0])


def timed(target: Model, draft: Model, exits: Sequence[int], length: int) -> Seconds:
    """What their forwards take here, medians."""
    found = {}
    last = len(exits) - 1
    for count in range(last + 1):
        for early in itertools.combinations(range(last), count):
            used = (*early, last)
            model = LazyLayers(draft, [exits[place] for place in used], "s2d")
            found[used] = _forwards(model, model.exits, 1)
    (verifying,) = _forwards(target, (None,), length + 1)
    return Seconds(found, verifying)


@torch.inference_mode()
def _forwards(model: Model, exits: Sequence[int | None], size: int) -> list[float]:
    """Seconds of a forward of `size` tokens up to each exit, behind the one below."""
    text = [1] * WARM
    cache = model.cache()
    taken: list[list[float]] = [[] for _ in exits]
    for turn in range(ROUNDS + 1):
        tree = TokenTree(1).chain(range(2, size + 1))
        for place, exit_layer in enumerate(exits):
            layers = None if exit_layer is None else tuple(range(exit_layer))
            ask = Ask(tree, rows=range(size), layers=layers)
            job, _ = cache.prepare(ask, text, WARM)
            start = time.perf_counter()
            model.forward([job])
            if turn:  # the first one reads the text
                taken[place].append(time.perf_counter() - start)
        text = [*text, 1]
    return [statistics.median(seconds) for seconds in taken]


def calibrate(
    lm: LM,
    files: Sequence[Path],
    folder: Path,
    length: int = 4,
    window: int = 640,
    most: int = 64,
    name: str = "",
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Finds the thresholds for `lm`'s target and draft model, writes them into the draft model's
    `folder`, and returns what stands there. `most`: answers that are measured on.

    Raises BadConfig where the draft model has no exits, or too many.
    """
    target, draft = lm.models["target"], lm.models["draft"]
    told = trained(draft)
    if told is None or not 2 <= len(told.layers) <= MOST:
        what = "no exits" if told is None else f"{len(told.layers)} exits"
        raise BadConfig(
            f"{folder}: {draft.name} has {what}, and 2 to {MOST} are needed; "
            "train it with `foretell train draft --exits`"
        )
    texts = list(itertools.islice(held_back(files, window), most))

    def noted() -> Iterator[Text]:
        for number, text in enumerate(texts):
            if tell is not None:
                tell("reading answers", number, len(texts))
            yield text

    seen = look(target, LazyLayers(draft, told.layers, "s2d"), noted(), window)
    seconds = timed(target, draft, told.layers, length)
    thresholds = best(seen, seconds, length)
    found: dict[str, Any] = {"thresholds": list(thresholds), "length": length}
    deepest = (OUT,) * (len(told.layers) - 1)
    for key, one in (("found", thresholds), ("last_exit", deepest)):
        speed, greedy, drawn, shares = promise(seen, seconds, one, length)
        numbers = {"tokens_per_s": speed, "greedy": greedy, "drawn": drawn}
        found[key] = {part: round(value, 4) for part, value in numbers.items()}
        if key == "found":
            found["shares"] = [round(share, 4) for share in shares]
    keep(folder, target, name or target.name, found)
    return found
