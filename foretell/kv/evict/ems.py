"""Evicts what no head needs, and merges what is much like a kept row into it, head by head.

A row's score is the larger of two: the mean attention it got of all nodes, and that of the last
`window` ones; both are brought to one mean first. In each key head the rows of the highest scores
are centres, the next ones are merged each into the centre most like it, and those that are like
none, or matter to nobody, go. A centre's score becomes the sum of what it took in.

Paper: Li et al., EMS: Adaptive Evict-then-Merge Strategy for Head-wise KV Cache Compression Based
on Global-Local Importance, arXiv:2412.08521
Guarantee: lossy: rows are given up and merged; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text
Trains: nothing
Differs:
- the paper's thresholds are not known here: `mass`, `rho` and `tau` are our choice
- every head keeps as many centres; how many rows are merged differs by head, as in the paper
- likeness is the product of the cosines of keys and values, each at least 0: two negative ones do
not make a likeness
- keys are compared and merged as they were cached, and the result stands at its centre's position
- behind the prompt the last nodes are those since the last eviction, at most `window`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import max_pool1d, normalize

from foretell.errors import BadConfig
from foretell.kv.base import KV, Attended, best, check_budget

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Ems(KV):
    """Counts of rows and tokens, and shares."""

    role = "evictor"

    budget: int = 256  # rows of a layer's head
    every: int = 64  # tokens between two evictions; 0: only a prompt is evicted from
    window: int = 32  # last tokens, whose attention is the local score and whose rows stay
    sinks: int = 4  # first rows, which stay
    kernel: int = 7  # neighbours that a local score is the largest of, an odd number
    mass: float = 0.95  # of all scores: rows behind those that reach it together go
    rho: float = 1.0  # rows that are merged for each that stays, at most
    tau: float = 0.6  # the least likeness of rows that are merged; above 1 none is

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("window", 1), ("sinks", 0), ("rho", 0), ("tau", 0)):
            if not getattr(self, name) >= least:
                raise BadConfig.field(f"ems:{name}", getattr(self, name), f"at least {least}")
        least = self.sinks + self.window + 1
        check_budget("ems", self.budget, least, "sinks, window and a row beside them")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise BadConfig.field("ems:kernel", self.kernel, "an odd number, at least 1")
        if not 0 < self.mass <= 1:
            raise BadConfig.field("ems:mass", self.mass, "above 0, at most 1")

    def policy(self, target: Model) -> Merging:
        self.fits(target)
        return Merging(self.budget, self.every, settings=self)


@dataclass
class Merging(Attended):
    """Adds up two parts of what rows receive: what all nodes give, and what the last ones give."""

    settings: Ems = field(default_factory=Ems)
    # Of each layer the places in the text of the rows that stayed (KV, kept).
    places: dict[int, torch.Tensor] = field(default_factory=dict)

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.places = {}

    def counts(self, place: int) -> bool:
        return place < self.first or self.every > 0

    def room(self, length: int) -> int:
        left = super().room(length)
        return left - self.settings.window if left > self.settings.window else left

    def scored(self, job: Any, given: torch.Tensor) -> torch.Tensor:
        place = self.place(job)
        last = self.next_change(place) - place <= self.settings.window
        return torch.cat([given, given if last else torch.zeros_like(given)])

    def evict(self, cache: Any) -> None:
        chosen, rows = [], []
        places, received = {}, {}
        for layer in range(len(cache.layout)):
            keys, values = (part[layer][:, : cache.base] for part in (cache.k, cache.v))
            where = self._where(cache, layer)
            scores = self.scores(self.received[layer], cache.length - where)
            centres, others = self.classes(scores)
            *merged, taken = merge(keys, values, scores, centres, others, self.settings.tau)
            chosen.append(centres)
            rows.append(merged)
            places[layer] = where.gather(1, centres)
            # As if all nodes that saw the centre had given it its score.
            received[layer] = torch.cat([taken * (cache.length - places[layer]), 0 * taken])
        cache.keep_rows(chosen)
        for layer, merged in enumerate(rows):
            for buffer, new in zip((cache.k[layer], cache.v[layer]), merged, strict=True):
                buffer[:, : cache.base] = new
        self.places, self.received = places, received

    def _where(self, cache: Any, layer: int) -> torch.Tensor:
        """The places in the text of a layer's rows (KV, base)."""
        old = self.places.get(layer)
        heads = cache.layout[layer][0]
        if old is None:
            old = torch.zeros(heads, 0, dtype=torch.long, device=cache.device)
        new = torch.arange(cache.length - cache.base + old.shape[1], cache.length)
        return torch.cat([old, new.to(old.device).expand(heads, -1)], 1)

    def scores(self, received: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """(KV, base) of what the rows received (2 * KV, base), `seen` by so many nodes each."""
        overall, local = received.chunk(2)
        # Rows that were evicted from before have no more local nodes than came since.
        nodes = self.settings.window if not self.places else min(self.settings.window, self.every)
        local = local / nodes
        overall = overall / seen
        kernel, before = self.settings.kernel, local.shape[1] - self.settings.window
        pooled = max_pool1d(local[:, None, :before], kernel, 1, kernel // 2)[:, 0]
        local = torch.cat([pooled, local[:, before:]], 1)
        aligned = overall * (local.mean(1, keepdim=True) / overall.mean(1, keepdim=True))
        return torch.maximum(aligned, local)

    def classes(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each head the centres (KV, budget), in order, and the rows to be merged (KV, n): -1
        where it has fewer than others.
        """
        rows = scores.shape[1]
        forced = scores.clone()
        forced[:, : self.settings.sinks] = torch.inf
        forced[:, rows - self.settings.window :] = torch.inf
        order = best(forced, rows)
        sorted_scores = scores.gather(1, order)
        reached = sorted_scores.cumsum(1) - sorted_scores  # before each row
        matters = reached < self.settings.mass * scores.sum(1, keepdim=True)
        most = min(rows, int((1 + self.settings.rho) * self.budget))
        others = order[:, self.budget : most].where(matters[:, self.budget : most], -1)
        return order[:, : self.budget].sort(-1).values, others


def merge(
    keys: torch.Tensor,
    values: torch.Tensor,
    scores: torch.Tensor,
    centres: torch.Tensor,
    others: torch.Tensor,
    tau: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values (KV, budget, D) and scores (KV, budget) of the centres, with the other rows
    (KV, n), but those of -1, in the centres that they are most like, if at least `tau`.

    Means are weighted by the scores (KV, rows); a key's length is the mean length.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    asked = torch.cat([centres, others.clamp(min=0)], 1)

    def parts(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = rows.gather(1, asked[..., None].expand(-1, -1, rows.shape[-1])).to(wide)
        return found.split([centres.shape[1], others.shape[1]], 1)

    (key, other_key), (value, other_value) = parts(keys), parts(values)
    (score, other_score) = (part[..., 0] for part in parts(scores[..., None]))
    alike = _cosines(other_key, key) * _cosines(other_value, value)
    likeness, into = alike.max(-1)
    goes = (others >= 0) & (likeness >= tau)
    # What each centre (KV, budget, n) takes of each row.
    weights = torch.zeros_like(alike.transpose(1, 2))
    weights.scatter_(1, into[:, None], (other_score * goes)[:, None])
    taken = weights.sum(-1)
    total = score + taken

    def mean(own: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        return (score[..., None] * own + weights @ theirs) / total[..., None]

    lengths = mean(key.norm(dim=-1, keepdim=True), other_key.norm(dim=-1, keepdim=True))
    directions = normalize(mean(normalize(key, dim=-1), normalize(other_key, dim=-1)), dim=-1)
    merged = (taken > 0)[..., None]
    new_key = torch.where(merged, lengths * directions, key)
    new_value = torch.where(merged, mean(value, other_value), value)
    return new_key.to(keys.dtype), new_value.to(values.dtype), total


def _cosines(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """(KV, n, m), those below 0 as 0."""
    cosines = normalize(ours, dim=-1) @ normalize(theirs, dim=-1).transpose(1, 2)
    return cosines.clamp(min=0)
