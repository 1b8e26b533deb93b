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

    def note_forward(self, token_count: int, seconds: float, cache_rows: int = 0) -> None:
        """Takes note of a forward of `token_count` tokens and `cache_rows` cache rows, in
        `seconds`.

        An outlier counts at most twice the mean, so that a hiccup does not end drafting. A machine
        that has become slower is slower for every size, also for those not run at the moment: all
        sizes follow, the measured one a little more. Otherwise drafts would be priced by the speed
        of one time and their gain by the speed of another.
        """
        self.noted += 1
        if self.noted % FRESH == 0 or len(self.shared) > KEPT_SHARES:
            self.shared.clear()
        size = 1 << (token_count - 1).bit_length()
        if size > SIZES[-1]:  # a chunk of a prompt, of any length up to this size
            seconds *= size / token_count
        row_seconds = self.slope.get(size, 0.0) * cache_rows
        if size not in self.seconds:
            self.seconds[size] = max(seconds - row_seconds, FIRST_SHARE * seconds)
            return
        # Five tokens are not eight: where each has its price, eight would look too cheap.
        between_sizes = token_count < size <= SIZES[-1]
        expected = (
            self.curve(token_count, cache_rows)[-1]
            if between_sizes
            else self.seconds[size] + row_seconds
        )
        relative_change = RATE * (min(float(seconds / expected), HICCUP) - 1)
        if size > SIZES[-1]:
            self.seconds[size] *= 1 + relative_change
            return
        for known_size in self.seconds:
            self.seconds[known_size] *= 1 + relative_change
        for known_size in self.slope:
            self.slope[known_size] *= 1 + relative_change
        self.seconds[size] *= 1 + OWN_SHARE * relative_change

    def curve(self, size: int, rows: int = 0) -> np.ndarray:
        """Estimated seconds (size,) of a forward of 1, 2, ..., `size` tokens; never falling.

        Between known sizes it interpolates; beyond the largest it assumes a machine whose memory
        is the bottleneck.
        """
        if size == 1:  # every step that drafts nothing asks for this
            return np.array([self.one_token_seconds(rows)])
        known_sizes = tuple(sorted(self.seconds)) or (1,)
        known_seconds = [self._seconds_at(known_size, rows) for known_size in known_sizes]
        rising = np.maximum.accumulate(known_seconds)
        if self.work is not None:
            return _seconds_by_work(self.work(max(size, known_sizes[-1])), known_sizes, rising)[
                :size
            ]
        curve: np.ndarray = _curve_weights(size, self.sizes, known_sizes) @ rising
        return curve

    def share(self, size: int, rows: int, request_count: int, prompt_tokens: int = 0) -> np.ndarray:
        """Returns a request's share (size,) of `curve`, with `request_count` of as many tokens.

        `prompt_tokens`: tokens of other requests' prompts in the same forward. They pay as much as
        tokens of a forward without drafts, so that a draft that delays them costs what it takes.

        Every request asks for it in every step: it is kept for FRESH forwards, and for lengths
        that differ by less than ROW_STEP rows.
        """
        request_count = max(1, request_count)
        rows = rows // ROW_STEP * ROW_STEP
        cache_key = (size, rows, request_count, prompt_tokens)
        if cache_key not in self.shared:
            curve = self.curve(request_count * size + prompt_tokens, rows)[prompt_tokens:]
            prompt_seconds = (
                prompt_tokens * curve[request_count - 1] / (request_count + prompt_tokens)
            )
            self.shared[cache_key] = (
                curve[request_count - 1 :: request_count] - prompt_seconds
            ) / request_count
        return self.shared[cache_key]

    def row_seconds(self) -> float:
        """Seconds of a new token for each cache row that it attends to, among many new tokens."""
        size = max(self.slope, default=1)
        return self.slope.get(size, 0.0) / size

    def freeze_curve(self) -> None:
        """Keeps the curve as it is now for `fixed_curve`: it was measured, and is not followed."""
        self.frozen = (dict(self.seconds), dict(self.slope))
        if self.work is not None:
            self.frozen_work = self.work(max(2 * SIZES[-1], *self.seconds))

    def fixed_curve(self, size: int, rows: int = 0) -> np.ndarray | None:
        """The curve as it was when frozen; None: it never was."""
        if self.frozen is None:
            return None
        frozen_costs = Costs()
        frozen_costs.seconds, frozen_costs.slope = self.frozen
        frozen_costs.sizes = self.sizes
        work = self.frozen_work
        if work is not None:
            frozen_costs.work = lambda rows: np.pad(work, (0, max(0, rows - len(work))), "edge")[
                :rows
            ]
        return frozen_costs.curve(size, rows)

    def one_token_seconds(self, rows: int = 0) -> float:
        """The first of `curve`: estimated seconds of a forward of one token."""
        return self._seconds_at(min(self.seconds, default=1), rows)

    def _seconds_at(self, known_size: int, rows: int) -> float:
        return self.seconds.get(known_size, 1.0) + self.slope.get(known_size, 0.0) * rows


@lru_cache(512)
def _curve_weights(size: int, sizes: tuple[int, ...], known_sizes: tuple[int, ...]) -> np.ndarray:
    """Weights (size, len(known_sizes)) that turn seconds at known sizes into a curve.

    `sizes`: as of Costs.
    """
    token_counts = np.arange(1, size + 1)
    if sizes:
        step_sizes = np.array(sizes)
        filled_sizes = step_sizes[np.searchsorted(step_sizes[:-1], token_counts)]
        token_counts = np.where(token_counts > step_sizes[-1], token_counts, filled_sizes)
    unit_vectors = np.eye(len(known_sizes))
    weight_columns = [np.interp(token_counts, known_sizes, vector) for vector in unit_vectors]
    beyond_share = np.maximum(0, token_counts - known_sizes[-1]) / SIZES[-1]
    weights: np.ndarray = np.stack(weight_columns, 1) * (1 + beyond_share)[:, None]
    return weights


def _seconds_by_work(
    work: np.ndarray, known_sizes: tuple[int, ...], seconds: np.ndarray
) -> np.ndarray:
    """Seconds of forwards that do this `work` (n,), of what those of known sizes take: between two
    of them as much of the way as their work is, and in its proportion elsewhere.
    """
    rising = np.maximum.accumulate(work)
    known_work = rising[np.array(known_sizes) - 1]
    curve: np.ndarray = np.interp(rising, known_work, seconds)
    below_known, beyond_known = rising < known_work[0], rising > known_work[-1]
    curve[below_known] = seconds[0] * rising[below_known] / known_work[0]
    curve[beyond_known] = seconds[-1] * rising[beyond_known] / known_work[-1]
    return curve


class Promise:
    """Tokens that a drafter's trees promise by their number of nodes, and seconds that asking
    takes: running means, which tell whether the next one pays at any load.
    """

    def __init__(
        self, hit_rates: Sequence[float] = (), seconds: float = 0.0, share: float = 0.0
    ) -> None:
        """`hit_rates`: how often its best token of each depth was right where it was measured;
        without them the first tree tells. `seconds`: what asking should take, until it was seen;
        `share`: of a forward of the target, what one of its model should take.
        """
        self.expected = np.zeros(0)  # tokens accepted of the best 0, 1, 2, ... nodes
        self.trees = 0  # that were seen, what was measured elsewhere counting as one
        self.seconds = seconds  # that asking takes
        self.share = share
        self.seen = False  # whether these were measured
        self.idle = 0.0  # seconds of steps without an ask since the last one that did not pay
        self.rest = 0  # steps that are not looked at
        if len(hit_rates):
            self.note_tree(list(np.cumprod(hit_rates)))

    def note_tree(self, chances: Sequence[float]) -> None:
        """A tree was proposed, whose nodes will be reached with these probabilities."""
        self.rest = 0
        self.trees += 1
        ordered_chances = sorted(chances, reverse=True)[: PROMISED - 1]
        expected_tokens = np.cumsum(
            [0.0, *ordered_chances, *[0.0] * (PROMISED - 1 - len(ordered_chances))]
        )
        if not len(self.expected):
            self.expected = expected_tokens
        self.expected = self.expected + max(RATE, 1 / self.trees) * (
            expected_tokens - self.expected
        )

    def note_seconds(self, seconds: float) -> None:
        """Asking for it took so long."""
        self.seconds += (RATE if self.seen else 1.0) * (seconds - self.seconds)
        self.seen = True

    def pays(
        self, shares: Callable[[int], np.ndarray], reading_seconds: Callable[[], float], steps: int
    ) -> bool:
        """Whether to ask in this step. `shares(n)`: seconds (n,) of a step with 1, 2, ... tokens;
        `reading_seconds()`: what taking in the text before takes, which has to pay in the `steps`
        that are left at most.

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
        saved_seconds = float((self.expected * curve[0] - (curve - curve[0])).max())
        if saved_seconds > CLEARLY * self.seconds:  # or nothing that is left to read need be known
            total_price = self.seconds + reading_seconds() / max(1, steps)
            if saved_seconds > CLEARLY * total_price:
                return True
        self.idle += LOOKED * float(curve[0])
        if self.idle * LOSS > self.seconds + reading_seconds():
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

    def is_due(self) -> bool:
        """Whether to ask in this step; to be called once a step of each request.

        Others wait at once, since several ask before the first has learnt what it came to.
        """
        self.wait -= 1
        if self.wait >= 0:
            return False
        self.wait = self.pause
        return True

    def note_attempt(
        self,
        gained_tokens: float,
        spent_seconds: float,
        token_seconds: float,
        request_count: int = 1,
    ) -> None:
        """Takes note of an attempt of `spent_seconds` that won `gained_tokens`, which take
        `token_seconds` each without it. `request_count`: requests that take steps together.
        """
        self.gain += RATE * (gained_tokens - self.gain)
        self.spent += (RATE if self.spent else 1.0) * (spent_seconds - self.spent)
        self.won = self.gain * token_seconds
        lost_steps = max(0.0, self.spent / token_seconds - self.gain)
        # Each of them may become predictable: that is to be noticed in so many steps of its own.
        costly_pause = max(LONGEST_PAUSE * max(1, request_count), int(lost_steps / COSTLY_LOSS))
        longest_pause = min(costly_pause, int(lost_steps / LOSS))
        self.pause = min(longest_pause, 2 * self.pause + 1)
        windfall = gained_tokens * token_seconds >= WINDFALL * spent_seconds
        self.wait = 0 if windfall else self.pause
