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
- the row after the first ones can be read, and no sentence is too long to be kept
- room that ended sentences leave goes to the running one, whose rows are read as recent ones only
- rows stay in memory beside the model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.settings import Odd, Range
from foretell.errors import BadConfig
from foretell.kv.base import KV, bytes_of, check_budget
from foretell.kv.select.base import attend_to
from foretell.kv.select.sentences import Index, Node, Path, Share, node_paths, sentence_ends
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
    sinks: Annotated[int, Range(0)] = 32  # first rows, which are read always
    recent: Annotated[int, Range(1)] = 32  # last rows, the same
    threshold: Annotated[int, Range(0)] = 0  # first tokens of a sentence, which read everything
    window: Annotated[int, Range(1)] = 32  # last tokens of the prompt, which vote and stay
    kernel: Annotated[int, Odd(1)] = 7  # neighbours that a vote is smoothed over

    def __post_init__(self) -> None:
        super().__post_init__()
        min_value = self.sinks + self.recent + 1
        reserved_rows = f"{self.sinks} first rows, {self.recent} last ones and one between them"
        check_budget("sentence-kv", self.budget, min_value, reserved_rows)
        if not self.factor * self.budget >= self.window + 1 or self.factor < 1:
            allowed_values = f"at least 1, and with the budget room for a window of {self.window}"
            raise BadConfig.field("sentence-kv:factor", self.factor, allowed_values)

    def build_policy(self, target: Model) -> Sentences:
        self.check_target(target)
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
    """Rows change after the prompt; then sentences end where committed tokens end them.

    Nodes of a draft that follow a full stop of it read by an index that has that sentence
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
    query_sums: dict[int, torch.Tensor] = field(default_factory=dict)
    count: int = 0
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    walked: tuple[Any, list[Node]] | None = None  # of the running job

    plain = False

    def begin_text(self, prompt: int) -> None:
        super().begin_text(prompt)
        self.stops, self.places, self.index, self.closed = (), {}, {}, 0
        self.query_sums, self.count, self.queries, self.walked = {}, 0, {}, None

    @property
    def bytes(self) -> int:
        return bytes_of(
            part for index in self.index.values() for part in (index.sentence_of, index.means)
        )

    def room_left(self, length: int) -> int:
        eviction_room = super().room_left(length)
        return min(eviction_room, self.prompt - length) if length < self.prompt else eviction_room

    def watches_job(self, job: Any) -> bool:
        return job.cache.length >= self.prompt or super().watches_job(job)

    # --- what is committed

    def keep_nodes(self, cache: Any, nodes: Sequence[int]) -> None:
        if cache.length < self.prompt:
            super().keep_nodes(cache, nodes)
            end_indices = [i for i, node in enumerate(nodes) if cache.tokens[node] in self.ends]
            self.stops = (*self.stops, *(cache.length + i for i in end_indices))
            return
        running_start = 0
        for i, node in enumerate(nodes):
            if cache.tokens[node] in self.ends:
                self._close_sentence(cache.k, cache.base + i + 1)
                running_start = i + 1
        running_nodes = list(nodes[running_start:])
        if running_nodes:
            self.count += len(running_nodes)
            node_sums = {
                layer: layer_queries[:, running_nodes].sum(1)
                for layer, layer_queries in self.queries.items()
            }
            self.query_sums = {
                layer: layer_queries + self.query_sums.get(layer, 0)
                for layer, layer_queries in node_sums.items()
            }
        self.queries, self.walked = {}, None

    def _close_sentence(self, keys: Sequence[torch.Tensor], end: int) -> None:
        """The rows before `end` that stand in no sentence yet are one."""
        sentence_rows = range(self.closed, end)
        self.index = {
            layer: index.close_sentence(keys[layer], sentence_rows)
            for layer, index in self.index.items()
        }
        self.closed, self.query_sums, self.count = end, {}, 0

    def choose_rows(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        chosen_rows = super().choose_rows(cache, layer, received)
        self.places = {**self.places, layer: chosen_rows.sort(-1).values}
        return chosen_rows

    def change_rows(self, cache: Any) -> None:
        """After the prompt: what it has too much goes, and its end ends a sentence."""
        if cache.length != self.prompt:
            return
        super().change_rows(cache)
        self.index = {}
        for layer, buffer in enumerate(cache.k):
            keys = buffer[:, : cache.base]
            all_rows = torch.arange(cache.base, device=keys.device).expand(len(keys), -1)
            row_places = self.places.get(layer, all_rows)
            self.index[layer] = Index.of_places(keys, row_places, self.stops)
        self.closed = cache.base
        self.received, self.places = {}, {}

    # --- what is read

    def attend_job(self, job: Any, attention: Attention) -> torch.Tensor:
        if job.cache.length < self.prompt:
            return super().attend_job(job, attention)
        read_rows = self._read_rows(job, attention.layer, attention.q, attention.keys)
        return attend_to(read_rows, attention)

    def _job_nodes(self, job: Any, row_count: int, device: torch.device) -> list[Node]:
        """The new nodes of a job, which are the same in every layer."""
        if self.walked is None or self.walked[0] is not job:
            plan, base = job.cache.plan, job.cache.base
            new_paths = node_paths(plan.tokens, plan.parents, job.start - base, self.ends)
            self.walked = (job, self.share.place_nodes(new_paths, base, row_count, device))
        return self.walked[1]

    def _read_rows(
        self, job: Any, layer: int, q: torch.Tensor, keys: torch.Tensor
    ) -> Listed | torch.Tensor:
        """The rows that each new node reads, bool (KV, n, rows), or a list of them."""
        first_row, row_count = job.start - job.cache.base, keys.shape[1]
        job_nodes = self._job_nodes(job, row_count, q.device)
        queries = q.unflatten(0, (len(keys), -1)).mean(1, dtype=self.index[layer].means.dtype)
        if first_row:
            queries = torch.cat([self.queries[layer][:, :first_row], queries], 1)
        self.queries = {**self.queries, layer: queries}
        read_masks = [q.new_ones(len(keys), row_count, dtype=torch.bool)] * len(job_nodes)
        # By the scratch rows that end a sentence above a node.
        indexes: dict[tuple[int, ...], Index] = {(): self.index[layer]}
        for i, node in enumerate(job_nodes):
            query, count = self._mean_query(layer, queries, node.path)
            if node.hidden is None or count <= self.threshold:
                continue
            sentence_ends = node.path.ends
            if sentence_ends not in indexes:
                open_rows = range(self.closed, job.cache.base)
                indexes[sentence_ends] = self.index[layer].extend_along(keys, node.path, open_rows)
            if len(job_nodes) == 1 and job.seen is None:  # it sees all rows
                return self.share.list_rows(
                    indexes[sentence_ends].score_rows(query, row_count - self.share.recent)
                )
            row_scores = indexes[sentence_ends].score_rows(query, row_count)
            read_masks[i] = self.share.read_mask(row_scores, node.hidden)
        return torch.stack(read_masks, 1)

    def _mean_query(
        self, layer: int, mean_queries: torch.Tensor, path: Path
    ) -> tuple[torch.Tensor, int]:
        """The mean query of a node's running sentence (KV, D), and of how many it is."""
        sentence_rows, count = path.running_rows, len(path.running_rows)
        are_adjacent = sentence_rows[-1] - sentence_rows[0] == count - 1
        query_sum = (
            mean_queries[:, sentence_rows[0] : sentence_rows[-1] + 1]
            if are_adjacent
            else mean_queries[:, sentence_rows]
        ).sum(1)
        if self.count and not path.ends:
            query_sum, count = query_sum + self.query_sums.get(layer, 0), count + self.count
        return query_sum / count, count
