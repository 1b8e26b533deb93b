"""What a forward costs on this machine: measured once, kept on disk, followed while it runs.

`profile` measures a model's forward for 1 to 64 tokens behind two lengths of text, and keeps the
numbers in a file of the user's cache folder, one for every model, dtype, device, number of threads
and version. `Costs` starts from them, or from nothing, and follows what every forward of the engine
takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from foretell.core.tree import TokenTree
from foretell.core.types import Ask

if TYPE_CHECKING:
    from foretell.core.cache import Cache
    from foretell.core.model import Model

RATE = 1 / 8  # of the running means
OWN = 1 / 4  # of a change that is the measured size's own
LUCK = 2.0  # times its price that an asking brings in
SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens of a forward
ROWS = (64, 1024)  # rows before them
PRICE, DEAR = (
    0.01,
    0.05,
)  # share of the time that asking in vain should lose, and may where asking is dear
ROUNDS, SECONDS = 9, 2.0  # of measuring: at most, and about
QUICK = 0.02  # seconds of a forward that may be repeated at once


class Costs:
    """Seconds of a forward by its tokens: running means at powers of two, interpolated between
    them.

    `seconds[size]` is with no rows to look back on, `slope[size]` what each row adds (0 until a
    profile says more).
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.slope: dict[int, float] = {}
        self.sizes: tuple[
            int, ...
        ] = ()  # what a model computes that fills every forward up to one of a few sizes

    def note(self, tokens: int, seconds: float, rows: int = 0) -> None:
        """One forward behind `rows` rows. An outlier counts at most twice the mean: a hiccup does
        not end drafting.

        A machine that has become slower is so for all sizes, those too that are not run now: all
        follow, and the measured one a little more. Else what a draft costs would be judged by
        another time than what it saves.
        """
        size = 1 << (tokens - 1).bit_length()
        behind = self.slope.get(size, 0.0) * rows
        if size not in self.seconds:
            self.seconds[size] = max(seconds - behind, 0.1 * seconds)
            return
        change = RATE * (min(seconds / (self.seconds[size] + behind), 2.0) - 1)
        if size > SIZES[-1]:  # a piece of a prompt, of any length up to this
            self.seconds[size] *= 1 + change
            return
        for parts in (self.seconds, self.slope):
            for n in parts:
                parts[n] *= 1 + change
        self.seconds[size] *= 1 + OWN * change

    def line(self, size: int, rows: int = 0) -> np.ndarray:
        """Estimated seconds (size,) of 1, 2, ..., `size` tokens; never falling.

        Sizes beyond all seen cost as on a machine bound by memory.
        """
        if size == 1:  # asked for in every step that drafts nothing
            return np.array([self.one(rows)])
        known = tuple(sorted(self.seconds)) or (1,)
        seconds = list(
            accumulate(
                (self.seconds.get(n, 1.0) + self.slope.get(n, 0.0) * rows for n in known), max
            )
        )
        line: np.ndarray = _shares(size, self.sizes, known) @ seconds
        return line

    def share(self, size: int, rows: int, live: int) -> np.ndarray:
        """A request's share (size,) of the seconds where `live` of them have as many tokens
        each.
        """
        live = max(1, live)
        return self.line(live * size, rows)[live - 1 :: live] / live

    def one(self, rows: int = 0) -> float:
        """The first of `line`, estimated seconds of a single token."""
        n = min(self.seconds, default=1)
        return self.seconds.get(n, 1.0) + self.slope.get(n, 0.0) * rows


@lru_cache(512)
def _shares(size: int, sizes: tuple[int, ...], known: tuple[int, ...]) -> np.ndarray:
    """Of each known size's seconds the share that 1, 2, ..., `size` tokens take, filled up: (size,
    len(known)).
    """
    tokens = np.arange(1, size + 1)
    if sizes:
        steps = np.array(sizes)
        tokens = np.where(tokens > steps[-1], tokens, steps[np.searchsorted(steps[:-1], tokens)])
    parts = np.stack([np.interp(tokens, known, part) for part in np.eye(len(known))], 1)
    shares: np.ndarray = parts * (1 + np.maximum(0, tokens - known[-1]) / 64)[:, None]
    return shares


class Worth:
    """Whether asking somebody pays: tokens gained against seconds spent, both running means of one
    asking.

    While it does not, the pauses between two askings double, up to where they lose PRICE of the
    time, but to no more than 32 steps, so that a text which turns predictable is noticed; or, for
    what is dear, a draft model say, to where they lose DEAR of it. An asking that brings in LUCK
    times its price is followed by another one at once.
    """

    def __init__(self) -> None:
        self.gain, self.spent, self.wait, self.pause = 2.0, 0.0, 0, 0  # two tokens are hoped for

    def due(self) -> bool:
        """Whether to ask in this step."""
        self.wait -= 1
        return self.wait < 0

    def note(self, gained: float, spent: float, unit: float) -> None:
        """An asking took `spent` seconds and won `gained` tokens, of `unit` seconds each without
        it.
        """
        self.gain += (gained - self.gain) / 8
        self.spent += (spent - self.spent) / (8 if self.spent else 1)
        lost = max(0.0, self.spent / unit - self.gain)
        most = min(max(32, int(lost / DEAR)), int(lost / PRICE))
        self.pause = min(most, 2 * self.pause + 1)
        self.wait = (
            0 if gained * unit >= LUCK * spent else self.pause
        )  # what just paid well is tried again at once


@torch.inference_mode()
def measure(
    model: Model, tell: Callable[[int, int], None] = lambda done, total: None
) -> dict[int, list[float]]:
    """Medians of seconds, one for each of ROWS, by number of tokens; `tell(done, total)` after
    every forward.

    The configurations take turns, so that a slow second of the machine falls on all of them. The
    first round warms up and neither counts nor uses up the time, except where forwards are so slow
    that it is the only one.
    """
    rows = [min(r, model.context // 2) for r in ROWS]
    sizes = [n for n in SIZES if n + max(rows) <= model.context]
    seen: dict[tuple[int, int], list[float]] = {(n, r): [] for n in sizes for r in rows}
    done, total = 0, ROUNDS * len(seen)
    # Where all caches share one memory, a long one slows down a forward behind a short one.
    for together in [rows] if model.layout else [[r] for r in rows]:
        begin, caches = time.perf_counter(), {r: _behind(model, r) for r in together}
        first = sizes[0], together[0]
        for turn in range(ROUNDS):
            for n, r in ((n, r) for n, r in seen if r in caches):
                took = [_once(model, caches[r], n, r)]
                # The next of a size are quicker than the first, whose weights may have to come.
                while len(took) < 4 and took[0] < QUICK:
                    took.append(_once(model, caches[r], n, r))
                seen[n, r].append(min(took))
                done += 1
                tell(done, total)
            if time.perf_counter() - begin > SECONDS * len(together) / len(rows):
                # What took long may have been the compiling of an executor's graphs: then the next
                # is quick.
                if turn or _once(model, caches[first[1]], *first) > seen[first][0] / 2:
                    break
                begin = time.perf_counter()
        for cache in caches.values():
            cache.drop()
    return {n: [statistics.median(seen[n, r][1:] or seen[n, r]) for r in rows] for n in sizes}


def _once(model: Model, cache: Cache, n: int, rows: int) -> float:
    """Seconds of a chain of n tokens behind the committed rows."""
    cache.length, cache.tokens, cache.parents, cache.branch = rows, [], [], 0
    tree = TokenTree(0).chain(i % model.vocab for i in range(1, n))
    job, _ = cache.prepare(Ask(tree), [0] * (rows + 1), n)
    start = time.perf_counter()
    model.forward([job])
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - start


def _behind(model: Model, rows: int) -> Cache:
    """A cache with this many committed rows, whatever they hold."""
    if model.layout:
        cache = model.cache()
        cache._own(rows + SIZES[-1])
        return cache
    cache, text, whole = (
        model.cache(),
        [0] * (rows + 1),
        False,
    )  # its rows lie where only a forward can put them
    while not whole:
        job, whole = cache.prepare(Ask(TokenTree(0), rows=[0]), text, 512)
        model.forward([job])
    cache.commit(text)
    return cache


def numbers(model: Model) -> str:
    """The number format it computes in, by name: int8 where that is what its matrices have."""
    return "int8" if getattr(model, "narrow", False) else str(model.dtype).removeprefix("torch.")


def traits(model: Model) -> dict[str, str]:
    """What a measurement is valid for, by name."""
    from foretell import __version__

    inner, executor = (
        getattr(model, "hf", None),
        getattr(getattr(model, "executor", None), "name", "torch"),
    )
    executor += ", exact bits" * getattr(model, "exact_bits", False)
    size = sum(p.numel() for p in inner.parameters()) if isinstance(inner, torch.nn.Module) else 0
    size = getattr(model, "mark", size)  # of a file, its name, bytes and date
    device = (
        torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else processor()
    )
    return {
        "kind": type(inner or model).__name__,
        "executor": executor,
        "size": str(size),
        "vocabulary": str(model.vocab),
        "layers": str(len(model.layout)),
        "shapes": " | ".join(map(str, sorted(set(model.layout)))),
        "dtype": f"{'int8 and ' * getattr(model, 'narrow', False)}{model.dtype}",
        "device": device,
        "threads": f"{torch.get_num_threads()} threads",
        "torch": f"torch {torch.__version__}",
        "version": f"foretell {__version__}",
    }


def identity(model: Model) -> str:
    """The same in one line."""
    return " | ".join(traits(model).values())


def processor() -> str:
    """The processor's name; what the platform module says where no file tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def folder() -> Path:
    """$FORETELL_CACHE, else the user's cache folder."""
    given = os.environ.get("FORETELL_CACHE")
    return (
        Path(given)
        if given
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretell"
    )


def profile(
    model: Model, fresh: bool = False, tell: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Costs, Path]:
    """The costs of this model here: read from the cache folder, else (or when `fresh`) measured and
    kept there.

    Returns the file too; where the folder cannot be written there is none.
    """
    about = identity(model)
    path = folder() / "costs" / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.json"
    rows = [min(r, model.context // 2) for r in ROWS]
    try:
        document = {} if fresh else json.loads(path.read_text("utf-8"))
        seconds = {int(n): [float(x) for x in pair] for n, pair in document["seconds"].items()}
        if document["about"] != about or document["rows"] != rows or not seconds:
            raise ValueError
        if any(len(pair) != len(rows) or min(pair) <= 0 for pair in seconds.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        seconds = measure(model, tell)
        document = {
            "schema": "foretell.policy.costs/1",
            "about": about,
            "rows": rows,
            "seconds": seconds,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(document, indent=1), "utf-8")
            os.replace(part, path)
        except OSError:
            pass  # a folder that cannot be written costs the next start a measurement, nothing else
    costs = Costs()
    costs.sizes = getattr(getattr(model, "executor", None), "sizes", ())
    for n, (near, far) in seconds.items():
        costs.slope[n] = max(0.0, (far - near) / max(1, rows[1] - rows[0]))
        costs.seconds[n] = max(near - costs.slope[n] * rows[0], 0.1 * near)
    return costs, path
