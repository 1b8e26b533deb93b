"""Tokens that leave out layers: what policies are made of under which not all of a prompt passes
all layers.

    layers below the cut   all tokens, a piece of the prompt at a time; what leaves them waits
    layers from it on      once the prompt is in: the tokens that were chosen, at their positions

The prompt's last token is in the forward that chooses, so its logits are that forward's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from foretell.cache.job import Job
from foretell.cache.states import TappedStates
from foretell.core.model import Computed
from foretell.errors import BadConfig, Unsupported
from foretell.kv.base import CachePolicy, best
from foretell.ops.attention import Attention

if TYPE_CHECKING:
    from foretell.core.model import Model

Run = Callable[[Sequence[Job], Sequence[int]], Computed]

PIECE = 512  # tokens of a forward of the layers from the cut on


def check_layers(name: str, target: Model) -> int:
    """How many layers a target has. Raises Unsupported where its tokens cannot leave out some."""
    count = len(target.layout)
    if not (getattr(target, "skips", False) and {"layers", "taps"} <= target.caps and count > 1):
        need = "two layers or more that can be run one by one"
        raise Unsupported.missing(f"kv={name}", target.name, need, "leave kv out")
    return count


def check_share(name: str, field: str, share: float) -> None:
    """Raises BadConfig for what is no share of the tokens."""
    if not 0 < share <= 1:
        raise BadConfig.field(f"{name}:{field}", share, "above 0 and at most 1")


@dataclass
class Skipping(CachePolicy):
    """Of a prompt all tokens pass the first `cut` of `layers` layers, and only some the others.

    The last token's forward decides which, see `choose`. Scratch rows of the layers from the cut on
    hold nothing before it.
    """

    cut: int = 0
    layers: int = 0
    waiting: TappedStates | None = None  # what enters the layer at the cut, of all tokens

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.waiting = TappedStates([self.cut]) if self.leaves_out else None

    def fork(self) -> Skipping:
        twin = super().fork()
        assert isinstance(twin, Skipping)
        twin.waiting = None if self.waiting is None else self.waiting.fork()
        return twin

    @property
    def bytes(self) -> int:
        return super().bytes + (0 if self.waiting is None else self.waiting.bytes)

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        super().keep(cache, nodes)
        if self.waiting is not None:
            self.waiting.keep(nodes)

    # --- what a policy decides

    @property
    def leaves_out(self) -> bool:
        """Whether any token of this prompt leaves out a layer."""
        raise NotImplementedError

    def goes_on(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        """The forward of the layers from the cut on, when the job that has the prompt's last token
        is through the layers below: its logits, and of each tap from the cut on the states of the
        job's own nodes, by place.
        """
        raise NotImplementedError

    # --- the layers below the cut

    def skips(self, job: Any) -> bool:
        """All forwards of all layers over the prompt, and what is left of those that stopped."""
        if self.waiting is None or job.positions[0] >= self.prompt:
            return False
        layers = range(self.layers) if job.layers is None else job.layers
        rest = job.states is not None and layers[0] <= self.cut
        first = layers[0] if rest else 0
        return [*layers] == [*range(first, self.layers)]

    def through(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        assert self.waiting is not None
        below = self._below(job, taps, run)
        states = below.hidden[self.cut]
        self.waiting.write(job.start - job.cache.base, {self.cut: states})
        hidden = {tap: below.hidden[min(tap, self.cut)] for tap in taps}
        parts = [below]
        if job.positions[-1] == self.prompt - 1:
            above = self.goes_on(job, [tap for tap in taps if tap > self.cut], run)
            hidden |= above.hidden
            parts.append(above)
        return together(parts, hidden)

    def _below(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        """Runs the layers below the cut that the job has; the states of its nodes up to there."""
        first = 0 if job.layers is None else job.layers[0]
        if first == self.cut:
            none = job.states.new_zeros(0, 1)
            return Computed(none, dict.fromkeys((*taps, self.cut), job.states))
        wanted = sorted({self.cut, *(tap for tap in taps if tap < self.cut)})
        part = replace(job, layers=tuple(range(first, self.cut)), rows=[], follow=0)
        return run([part], wanted)


def piece_of(
    job: Any,
    start: int,
    places: Sequence[int],
    states: torch.Tensor,
    layers: Sequence[int],
    watcher: CachePolicy | None = None,
) -> Job:
    """A job of tokens at these places of the text that enter `layers` with states (n, E). Their
    rows go behind the first `start` of their cache, which they see, as they see each other: each
    those before it.
    """
    view = copy.copy(job.cache)
    view.base, view.positions, view.policy = start, None, watcher
    count = len(places)
    return replace(
        job,
        cache=view,
        tokens=[-1] * count,
        scratch_positions=list(places),
        start=start,
        seen=None,
        rows=[],
        first=-count,
        layers=tuple(layers),
        states=states,
        known={},
        follow=0,
        masks={},
    )


def pass_layers(
    job: Any,
    view: Any,
    layers: Sequence[int],
    held: torch.Tensor,
    places: torch.Tensor,
    states: torch.Tensor,
    run: Run,
    watcher: CachePolicy | None,
    taps: Sequence[int],
) -> list[Computed]:
    """Makes the rows in `layers` of tokens at these places (n,), ascending, that enter with states
    (n, E). The job's own one is the last of them.

    Rows stand at their places in the job's cache. The tokens read each other and those `held`, each
    what is before it. They are computed in `view`, a cache with empty buffers. Returned are the
    forwards, the last of the last token alone, under the `watcher`.
    """
    cache = job.cache
    count, last = len(held), len(places) - 1
    for layer in layers:
        for ours, theirs in ((view.k, cache.k), (view.v, cache.v)):
            ours[layer][:, :count] = theirs[layer][:, held]
    there = replace(job, cache=view)
    order = torch.cat([held, places])
    parts = []
    for low in range(0, last, PIECE):
        high = min(last, low + PIECE)
        texts = places[low:high].tolist()
        piece = piece_of(there, count + low, texts, states[low:high], layers)
        if count:
            # All rows are scratch rows to it: who sees whom is a matter of their places.
            piece.cache.base = 0
            piece.seen = (order[: count + high] <= places[low:high, None]).cpu()
        parts.append(run([piece], taps))
    piece = piece_of(there, count + last, places[last:].tolist(), states[last:], layers, watcher)
    piece.rows = [0] if job.rows and layers[-1] == len(cache.layout) - 1 else []
    parts.append(run([piece], taps))
    for layer in layers:
        for ours, theirs in ((cache.k, view.k), (cache.v, view.v)):
            ours[layer][:, places] = theirs[layer][:, count : count + last + 1]
    return parts


def together(parts: Sequence[Computed], hidden: dict[int, torch.Tensor]) -> Computed:
    """The forwards that made up one: the last one's logits, and these hidden states."""
    names = dict.fromkeys(part.computed_by for part in parts if part.width)
    # A name of its own, as its time says nothing about forwards of all layers.
    name = f"{'+'.join(names)} (skipping)"
    return Computed(parts[-1].logits, hidden, name, sum(part.width for part in parts))


def empty(cache: Any, rows: int) -> Any:
    """A cache of the same kind with buffers of its own, for so many rows."""
    view = copy.copy(cache)
    view.sharers = [1]
    view.begin(rows)
    return view


@dataclass
class LastRow(CachePolicy):
    """Takes note of what the last node of a job gives to all rows in one layer."""

    layer: int
    scores: torch.Tensor | None = None  # (rows,), the mean over all heads

    def watches(self, job: Any) -> bool:
        return True

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        if asked.layer == self.layer:
            last = asked.q[:, -1:]
            mask = None if asked.mask is None else asked.mask[..., -1:, :]
            self.scores = replace(asked, q=last, mask=mask).weights()[:, 0].mean(0)
        return asked.whole()

    def going_on(self, present: torch.Tensor, rate: float) -> torch.Tensor:
        """Of the rows, which are of the tokens at these places, ascending, all but a share of those
        that got least: the places of their tokens. The last one always goes on.
        """
        assert self.scores is not None
        scores = self.scores.clone()
        scores[-1] = torch.inf
        count = len(present) - int(rate * len(present))
        return present[best(scores, count).sort().values]
