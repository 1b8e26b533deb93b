"""What a forward costs, and whether an expense pays: the arithmetic the draft policy decides by.

`Costs` follows the seconds of every forward of the engine, starting from a measured profile
(`foretell.engine.cost_profile`) or from nothing. `Payoff` compares what asking a drafter takes with
what it brought in, `Promise` with what it would bring in at the load of the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens of the forwards that a profile measures
RATE = 1 / 8  # of the running means
FRESH = 8  # forwards between two looks at what forwards cost
ROW_STEP = 64  # rows of texts that are taken to be equally long
KEPT_SHARES = 1024
OWN_SHARE = 1 / 4  # of a change that only the measured size takes part in
HICCUP = 2.0  # times its mean that one forward counts for at most
FIRST_SHARE = 0.1  # of a forward that is never put down to the cache rows before it
WINDFALL = 2.0  # times its price that asking must bring in to be repeated at once
LOSS = 0.005  # share of the time that asking in vain should lose
COSTLY_LOSS = 0.05  # and that it may lose where asking is expensive
CLEARLY = 1.2  # times its price, what an attempt wins that is known to pay, or promises
LONGEST_PAUSE = 32  # steps of every request, unless asking is expensive
UNKNOWN = 64  # steps that wait for the first tree, in case that it never comes
LOOKED = 32  # steps of which one is looked at, where the last one looked at did not pay
PROMISED = 17  # tokens of the largest forward for which a promise is looked at


class Costs:
    """Seconds of a forward by its number of tokens: running means at powers of two.

    `seconds[size]`: with no cache rows to attend to. `slope[size]`: what each of these rows adds,
    0 until a profile says more. `sizes`: the only sizes the model computes, if it fills every
    forward up to the next of a few; else empty. `work`: what forwards of 1, 2, ... tokens do, up to
    a factor, where the model knows it better than that it lies between known sizes; the seconds of
    other sizes follow it.
    """

    def __init__(self, model: object = None) -> None:
        self.seconds: dict[int, float] = {}
        self.slope: dict[int, float] = {}
        self.sizes: tuple[int, ...] = ()
        self.work: Callable[[int], np.ndarray] | None = getattr(model, "work", None)
        self.frozen: tuple[dict[int, float], dict[int, float]] | None = None
        self.frozen_work: np.ndarray | None = None
        self.noted = 0  # forwards
        self.shared: dict[tuple[int, int, int, int], np.ndarray] = {}  # what `share` found lately

    def note(self, tokens: int, seconds: float, rows: int = 0) -> None:
        """One forward of `tokens` tokens that attended to `rows` cache rows took `seconds`.

        An outlier counts at most twice the mean, so that a hiccup does not end drafting. A machine
        that has become slower is slower for every size, also for those not run at the moment: all
        sizes follow, the measured one a little more. Otherwise drafts would be priced by the speed
        of one time and their gain by the speed of another.
        """
        self.noted += 1
        if self.noted % FRESH == 0 or len(self.shared) > KEPT_SHARES:
            self.shared.clear()
        size = 1 << (tokens - 1).bit_length()
        if size > SIZES[-1]:  # a chunk of a prompt, of any length up to this size
            seconds *= size / tokens
        row_seconds = self.slope.get(size, 0.0) * rows
        if size not in self.seconds:
            self.seconds[size] = max(seconds - row_seconds, FIRST_SHARE * seconds)
            return
        # Five tokens are not eight: where each has its price, eight would look too cheap.
        between = tokens < size <= SIZES[-1]
        expected = self.curve(tokens, rows)[-1] if between else self.seconds[size] + row_seconds
        change = RATE * (min(float(seconds / expected), HICCUP) - 1)
        if size > SIZES[-1]:
            self.seconds[size] *= 1 + change
            return
        for known_size in self.seconds:
            self.seconds[known_size] *= 1 + change
        for known_size in self.slope:
            self.slope[known_size] *= 1 + change
        self.seconds[size] *= 1 + OWN_SHARE * change

    def curve(self, size: int, rows: int = 0) -> np.ndarray:
        """Estimated seconds (size,) of a forward of 1, 2, ..., `size` tokens; never falling.

        Between known sizes it interpolates; beyond the largest it assumes a machine whose memory
        is the bottleneck.
        """
        if size == 1:  # every step that drafts nothing asks for this
            return np.array([self.single(rows)])
        known_sizes = tuple(sorted(self.seconds)) or (1,)
        known_seconds = [self._at(known_size, rows) for known_size in known_sizes]
        rising = np.maximum.accumulate(known_seconds)
        if self.work is not None:
            return _by_work(self.work(max(size, known_sizes[-1])), known_sizes, rising)[:size]
        curve: np.ndarray = _weights(size, self.sizes, known_sizes) @ rising
        return curve

    def share(self, size: int, rows: int, live: int, texts: int = 0) -> np.ndarray:
        """A request's share (size,) of `curve` where `live` requests have as many tokens each.

        `texts`: tokens of other requests' prompts in the same forward. They pay as much as the
        tokens of a forward without drafts, so that a draft that delays them costs what it takes.

        Every request asks for it in every step: it is kept for FRESH forwards, and for lengths
        that differ by less than ROW_STEP rows.
        """
        live = max(1, live)
        rows = rows // ROW_STEP * ROW_STEP
        key = (size, rows, live, texts)
        if key not in self.shared:
            curve = self.curve(live * size + texts, rows)[texts:]
            paid = texts * curve[live - 1] / (live + texts)
            self.shared[key] = (curve[live - 1 :: live] - paid) / live
        return self.shared[key]

    def row_seconds(self) -> float:
        """What a new token takes for each cache row that it attends to, among many new tokens."""
        size = max(self.slope, default=1)
        return self.slope.get(size, 0.0) / size

    def freeze(self) -> None:
        """Keeps the curve as it is now for `fixed_curve`: it was measured, and is not followed."""
        self.frozen = (dict(self.seconds), dict(self.slope))
        if self.work is not None:
            self.frozen_work = self.work(max(2 * SIZES[-1], *self.seconds))

    def fixed_curve(self, size: int, rows: int = 0) -> np.ndarray | None:
        """As `curve`, as it was when frozen; None: it never was."""
        if self.frozen is None:
            return None
        kept = Costs()
        kept.seconds, kept.slope = self.frozen
        kept.sizes = self.sizes
        work = self.frozen_work
        if work is not None:
            kept.work = lambda rows: np.pad(work, (0, max(0, rows - len(work))), "edge")[:rows]
        return kept.curve(size, rows)

    def single(self, rows: int = 0) -> float:
        """The first of `curve`: estimated seconds of a forward of one token."""
        return self._at(min(self.seconds, default=1), rows)

    def _at(self, known_size: int, rows: int) -> float:
        return self.seconds.get(known_size, 1.0) + self.slope.get(known_size, 0.0) * rows


@lru_cache(512)
def _weights(size: int, sizes: tuple[int, ...], known_sizes: tuple[int, ...]) -> np.ndarray:
    """Weights (size, len(known_sizes)) that turn seconds at known sizes into a curve.

    `sizes`: as of Costs.
    """
    tokens = np.arange(1, size + 1)
    if sizes:
        steps = np.array(sizes)
        filled = steps[np.searchsorted(steps[:-1], tokens)]
        tokens = np.where(tokens > steps[-1], tokens, filled)
    unit_vectors = np.eye(len(known_sizes))
    columns = [np.interp(tokens, known_sizes, vector) for vector in unit_vectors]
    beyond = np.maximum(0, tokens - known_sizes[-1]) / SIZES[-1]
    weights: np.ndarray = np.stack(columns, 1) * (1 + beyond)[:, None]
    return weights


def _by_work(work: np.ndarray, known_sizes: tuple[int, ...], seconds: np.ndarray) -> np.ndarray:
    """Seconds of forwards that do this `work` (n,), of what those of known sizes take: between two
    of them as much of the way as their work is, and in its proportion elsewhere.
    """
    rising = np.maximum.accumulate(work)
    known = rising[np.array(known_sizes) - 1]
    curve: np.ndarray = np.interp(rising, known, seconds)
    below, beyond = rising < known[0], rising > known[-1]
    curve[below] = seconds[0] * rising[below] / known[0]
    curve[beyond] = seconds[-1] * rising[beyond] / known[-1]
    return curve


class Promise:
    """What a drafter's trees promise by their number of nodes, and what asking for one takes:
    running means, which tell whether the next one pays at any load.
    """

    def __init__(
        self, hits: Sequence[float] = (), seconds: float = 0.0, share: float = 0.0
    ) -> None:
        """`hits`: how often its best token of each depth was right where it was measured; without
        them the first tree tells. `seconds`: what asking should take, until it was seen;
        `share`: of a forward of the target, what one of its model should take.
        """
        self.expected = np.zeros(0)  # tokens accepted of the best 0, 1, 2, ... nodes
        self.trees = 0  # that were seen, what was measured elsewhere counting as one
        self.seconds = seconds  # that asking takes
        self.share = share
        self.seen = False  # whether these were measured
        self.idle = 0.0  # seconds of steps without an ask since the last one that did not pay
        self.rest = 0  # steps that are not looked at
        if len(hits):
            self.note(list(np.cumprod(hits)))

    def note(self, chances: Sequence[float]) -> None:
        """A tree was proposed, whose nodes will be reached with these chances."""
        self.rest = 0
        self.trees += 1
        ordered = sorted(chances, reverse=True)[: PROMISED - 1]
        expected = np.cumsum([0.0, *ordered, *[0.0] * (PROMISED - 1 - len(ordered))])
        if not len(self.expected):
            self.expected = expected
        self.expected = self.expected + max(RATE, 1 / self.trees) * (expected - self.expected)

    def note_seconds(self, seconds: float) -> None:
        """Asking for it took so long."""
        self.seconds += (RATE if self.seen else 1.0) * (seconds - self.seconds)
        self.seen = True

    def pays(
        self, shares: Callable[[int], np.ndarray], reading: Callable[[], float], steps: int
    ) -> bool:
        """Whether to ask in this step. `shares(n)`: seconds (n,) of a step with 1, 2, ... tokens;
        `reading()`: what taking in the text before takes, which has to pay in the `steps` that
        are left at most.

        Where it does not pay, the next LOOKED - 1 steps are not looked at; and once in a while it
        is asked all the same, so rarely that this loses LOSS of the time.
        """
        if self.rest > 0:
            self.rest -= 1
            return False
        if not len(self.expected):  # one ask is enough to know
            self.rest = UNKNOWN
            return True
        curve = shares(PROMISED)
        saved = float((self.expected * curve[0] - (curve - curve[0])).max())
        if saved > CLEARLY * self.seconds:  # or nothing that is left to read need be known
            price = self.seconds + reading() / max(1, steps)
            if saved > CLEARLY * price:
                return True
        self.idle += LOOKED * float(curve[0])
        if self.idle * LOSS > self.seconds + reading():
            self.idle = 0.0
            return True
        self.rest = LOOKED - 1
        return False


class Payoff:
    """Whether asking somebody for a draft pays: running means of the tokens gained and the seconds
    spent.

    While it does not pay, the pause between two attempts doubles until the attempts lose LOSS of
    the time, but to no more than LONGEST_PAUSE steps, so that a text that becomes predictable is
    noticed. Where asking is expensive (a draft model, say), pauses may grow until the attempts
    lose COSTLY_LOSS of the time. An attempt that brings in WINDFALL times its price is repeated at
    once.
    """

    def __init__(self) -> None:
        self.gain = 2.0  # tokens an attempt brings in; hoped for at first
        self.spent = 0.0  # seconds an attempt takes
        self.won = 0.0  # seconds that the tokens of an attempt take without it
        self.wait = 0  # steps until the next attempt
        self.pause = 0  # steps between the last two attempts

    @property
    def pays(self) -> bool:
        """Whether the attempts win what they cost, or none has shown that they do not."""
        return not self.pause

    @property
    def clearly_pays(self) -> bool:
        """Whether attempts have won CLEARLY times what they cost."""
        return self.pays and self.won > CLEARLY * self.spent

    def due(self) -> bool:
        """Whether to ask in this step; to be called once a step of each request.

        Others wait at once, since several ask before the first has learnt what it came to.
        """
        self.wait -= 1
        if self.wait >= 0:
            return False
        self.wait = self.pause
        return True

    def note(self, gained: float, spent: float, token_seconds: float, live: int = 1) -> None:
        """An attempt took `spent` seconds and won `gained` tokens, which take `token_seconds` each
        without it. `live`: requests that take steps together.
        """
        self.gain += RATE * (gained - self.gain)
        self.spent += (RATE if self.spent else 1.0) * (spent - self.spent)
        self.won = self.gain * token_seconds
        lost_steps = max(0.0, self.spent / token_seconds - self.gain)
        # Each of them may become predictable: that is to be noticed in so many steps of its own.
        costly_pause = max(LONGEST_PAUSE * max(1, live), int(lost_steps / COSTLY_LOSS))
        longest = min(costly_pause, int(lost_steps / LOSS))
        self.pause = min(longest, 2 * self.pause + 1)
        windfall = gained * token_seconds >= WINDFALL * spent
        self.wait = 0 if windfall else self.pause
