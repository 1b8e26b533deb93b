"""Reads the sentences that the running one asks for.

A prompt keeps `factor` budgets of rows, those that its last `window` tokens vote for. The rows are
ordered by sentences: the mean query of the running sentence so far is multiplied by the mean key of
each, and the rows of those that give the most are read, with the first rows and the last ones.

Paper: Zhu et al., SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching,
arXiv:2504.00970
Guarantee: lossy: rows of the prompt are given up, queries leave rows out; with drafts the text is
the one without them
Cost: target 1
Needs: a tokenizer, and cache rows of every layer, of all of the text
Trains: nothing
Differs:
- heads that share a key head count by their mean, and read the same rows; the published code keeps
rows for every query head
- `threshold` is 0, so no token reads everything; in the published code the first of a sentence does
- tokens end a sentence by their text, with a closing quotation mark or bracket too
- the row behind the first ones can be read, and no sentence is too long to be kept
- room that ended sentences leave goes to the running one, whose rows are read as recent ones only
- rows stay in memory beside the model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foretell.errors import BadConfig
from foretell.kv.base import KV, bytes_of, check_budget
from foretell.kv.select.base import attend_to
from foretell.kv.select.sentences import Index, Node, Path, Share, paths, sentence_ends
from foretell.kv.voting import Voted
from foretell.ops.attention import Attention
from foretell.ops.row_attention import Listed

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class SentenceKv(KV):
    """Counts of rows and tokens."""

    role = "selector"

    budget: int = 1024  # rows that a query reads
    factor: float = 3.0  # a prompt keeps so many times as many
    sinks: int = 32  # first rows, which are read always
    recent: int = 32  # last rows, the same
    threshold: int = 0  # first tokens of a sentence, which read everything
    window: int = 32  # last tokens of the prompt, which vote and stay
    kernel: int = 7  # neighbours that a vote is smoothed over, an odd number

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("recent", 1), ("threshold", 0), ("window", 1)):
            if getattr(self, name) < least:
                raise BadConfig.field(
                    f"sentence-kv:{name}", getattr(self, name), f"at least {least}"
                )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise BadConfig.field("sentence-kv:kernel", self.kernel, "an odd number, at least 1")
        least = self.sinks + self.recent + 1
        what = f"{self.sinks} first rows, {self.recent} last ones and one between them"
        check_budget("sentence-kv", self.budget, least, what)
        if not self.factor * self.budget >= self.window + 1 or self.factor < 1:
            allowed = f"at least 1, and with the budget room for a window of {self.window}"
            raise BadConfig.field("sentence-kv:factor", self.factor, allowed)

    def policy(self, target: Model) -> Sentences:
        self.fits(target)
        return Sentences(
            int(self.factor * self.budget),
            0,
            window=self.window,
            kernel=self.kernel,
            ends=sentence_ends(target, "kv=sentence-kv"),
            share=Share(self.sinks, self.recent, self.budget - self.sinks - self.recent),
            threshold=self.threshold,
        )


@dataclass
class Sentences(Voted):
    """Rows change behind the prompt; then sentences end where committed tokens end them.

    Nodes of a draft that stand behind a full stop of it read by an index that has that sentence
    too. It is made for them alone: a full stop that is rejected leaves nothing.
    """

    ends: frozenset[int] = frozenset()
    share: Share = field(default_factory=Share)
    threshold: int = 0
    stops: tuple[int, ...] = ()  # places in the prompt of tokens that end a sentence
    places: dict[int, torch.Tensor] = field(default_factory=dict)  # of its rows that stayed
    index: dict[int, Index] = field(default_factory=dict)
    closed: int = 0  # rows that stand in sentences that have ended
    # The running sentence's queries, means over heads that share keys: of each layer their sum (KV,
    # D), how many they are, and those of the scratch rows (KV, rows, D).
    asked: dict[int, torch.Tensor] = field(default_factory=dict)
    count: int = 0
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    walked: tuple[Any, list[Node]] | None = None  # of the running job

    plain = False

    def begin(self, prompt: int) -> None:
        super().begin(prompt)
        self.stops, self.places, self.index, self.closed = (), {}, {}, 0
        self.asked, self.count, self.queries, self.walked = {}, 0, {}, None

    @property
    def bytes(self) -> int:
        return bytes_of(part for index in self.index.values() for part in (index.of, index.means))

    def room(self, length: int) -> int:
        room = super().room(length)
        return min(room, self.prompt - length) if length < self.prompt else room

    def watches(self, job: Any) -> bool:
        return job.cache.length >= self.prompt or super().watches(job)

    # --- what is committed

    def keep(self, cache: Any, nodes: Sequence[int]) -> None:
        if cache.length < self.prompt:
            super().keep(cache, nodes)
            ended = [i for i, node in enumerate(nodes) if cache.tokens[node] in self.ends]
            self.stops = (*self.stops, *(cache.length + i for i in ended))
            return
        first = 0
        for i, node in enumerate(nodes):
            if cache.tokens[node] in self.ends:
                self._close(cache.k, cache.base + i + 1)
                first = i + 1
        running = list(nodes[first:])
        if running:
            self.count += len(running)
            sums = {layer: part[:, running].sum(1) for layer, part in self.queries.items()}
            self.asked = {layer: part + self.asked.get(layer, 0) for layer, part in sums.items()}
        self.queries, self.walked = {}, None

    def _close(self, keys: Sequence[torch.Tensor], end: int) -> None:
        """The rows before `end` that stand in no sentence yet are one."""
        rows = range(self.closed, end)
        self.index = {layer: index.closed(keys[layer], rows) for layer, index in self.index.items()}
        self.closed, self.asked, self.count = end, {}, 0

    def chosen(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        rows = super().chosen(cache, layer, received)
        self.places = {**self.places, layer: rows.sort(-1).values}
        return rows

    def change(self, cache: Any) -> None:
        """Behind the prompt: what it has too much goes, and its end ends a sentence."""
        if cache.length != self.prompt:
            return
        super().change(cache)
        self.index = {}
        for layer, buffer in enumerate(cache.k):
            keys = buffer[:, : cache.base]
            every = torch.arange(cache.base, device=keys.device).expand(len(keys), -1)
            places = self.places.get(layer, every)
            self.index[layer] = Index.of_places(keys, places, self.stops)
        self.closed = cache.base
        self.received, self.places = {}, {}

    # --- what is read

    def attend(self, job: Any, asked: Attention) -> torch.Tensor:
        if job.cache.length < self.prompt:
            return super().attend(job, asked)
        return attend_to(self._reads(job, asked.layer, asked.q, asked.keys), asked)

    def _nodes(self, job: Any, rows: int, device: torch.device) -> list[Node]:
        """The new nodes of a job, which are the same in every layer."""
        if self.walked is None or self.walked[0] is not job:
            plan, base = job.cache.plan, job.cache.base
            found = paths(plan.tokens, plan.parents, job.start - base, self.ends)
            self.walked = (job, self.share.nodes(found, base, rows, device))
        return self.walked[1]

    def _reads(
        self, job: Any, layer: int, q: torch.Tensor, keys: torch.Tensor
    ) -> Listed | torch.Tensor:
        """The rows that each new node reads, bool (KV, n, rows), or a list of them."""
        first, rows = job.start - job.cache.base, keys.shape[1]
        found = self._nodes(job, rows, q.device)
        own = q.unflatten(0, (len(keys), -1)).mean(1, dtype=self.index[layer].means.dtype)
        if first:
            own = torch.cat([self.queries[layer][:, :first], own], 1)
        self.queries = {**self.queries, layer: own}
        read = [q.new_ones(len(keys), rows, dtype=torch.bool)] * len(found)
        # By the scratch rows that end a sentence above a node.
        indexes: dict[tuple[int, ...], Index] = {(): self.index[layer]}
        for i, node in enumerate(found):
            asked, count = self._asked(layer, own, node.path)
            if node.hidden is None or count <= self.threshold:
                continue
            ends = node.path.ends
            if ends not in indexes:
                begun = range(self.closed, job.cache.base)
                indexes[ends] = self.index[layer].above(keys, node.path, begun)
            if len(found) == 1 and job.seen is None:  # it sees all rows
                return self.share.listed(indexes[ends].given(asked, rows - self.share.recent))
            read[i] = self.share.read(indexes[ends].given(asked, rows), node.hidden)
        return torch.stack(read, 1)

    def _asked(self, layer: int, own: torch.Tensor, path: Path) -> tuple[torch.Tensor, int]:
        """The mean query of a node's running sentence (KV, D), and of how many it is."""
        rows, count = path.running, len(path.running)
        in_a_row = rows[-1] - rows[0] == count - 1
        total = (own[:, rows[0] : rows[-1] + 1] if in_a_row else own[:, rows]).sum(1)
        if self.count and not path.ends:
            total, count = total + self.asked.get(layer, 0), count + self.count
        return total / count, count
