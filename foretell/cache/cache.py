"""The rows a model keeps of one branch of a request.

    rows   0 ........ base-1 | base .......... base+len(scratch)-1 | free, grown by an eighth
           committed tokens  | the last forest: pending tokens and tree |

This file knows rows, tokens and which of them belong together; it knows no model. A cache is told
the branch's tokens and finds out by itself what it already has: it walks the scratch rows by token
and keeps those of the path that was committed. So a drafter's cache that is ahead, after or on
another path needs no bookkeeping. The last committed token is never kept: it is the root of the
next tree and is computed again, which is what gives its row of logits.

How many tokens a cache has taken in (`length`) and how many rows it holds of them (`base`) are two
things: a shared prefix (`segments`) or a policy that evicts makes the latter smaller.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foretell.cache.evicted import EvictedRows
from foretell.cache.job import Job
from foretell.cache.masks import seen_by
from foretell.cache.plan import (
    Plan,
    accepted_path,
    count_reusable,
    plan_part,
    plan_tree,
    resume_ask,
)
from foretell.cache.policy import NEVER, CachePolicy
from foretell.cache.states import NO_STATES, TappedStates, join_states

if TYPE_CHECKING:
    from foretell.cache.buffers import Shape
    from foretell.core.types import Ask


class Cache(EvictedRows):
    """Rows of one branch for one model."""

    job_type: type[Job] = Job
    recomputable = True  # whether its rows can be computed again from the tokens

    def __init__(
        self,
        layout: Sequence[Shape | None],
        dtype: torch.dtype,
        device: torch.device,
        capacity: int | None = None,
    ):
        super().__init__(layout, dtype, device, capacity)
        self.all_layers = frozenset(range(len(layout)))
        self.needed = self.all_layers  # that committed rows are kept of: see Ask.lasting
        self.length = 0  # committed tokens taken in
        self.base = 0  # rows held of them
        self.positions: list[int] | None = None  # of these rows, where some were evicted
        self.policy: CachePolicy | None = None
        self.changes_at = NEVER  # length at which the policy changes the rows next
        self.states: TappedStates | None = None  # the hidden states it keeps of its tokens
        self.beside: Cache | None = None  # the target's cache, where its model reads it
        self.feeds: tuple[int, ...] = ()  # taps of that which it feeds on
        self.lag = 1  # of the tokens so far before its own
        self.breadth = 1  # rows that its model writes for a level that follows
        self.inputs: Mapping[str, Any] = {}  # the request's
        self._clear_scratch()
        self.synced = 0  # tokens of the branch at the last `prepare`; 0: only a part of a text

    def _clear_scratch(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []  # -1 is the committed text
        self.done: frozenset[Any] = frozenset()  # layers whose scratch rows are written
        self.tapped: Mapping[int, torch.Tensor] = {}  # the scratch's states below layers to come
        self.trusted = 0  # scratch rows before this one may be kept; later ones are estimates
        self.plan: Plan | None = None  # what the running forward makes of the scratch rows

    def reserve(self, rows: int) -> None:
        """Makes the buffers this cache's alone and at least `rows` long."""
        self.grow_buffers(rows, self.base + len(self.tokens))

    def fork(self) -> Cache:
        """A copy that shares the buffers until one of the two writes."""
        self.read_by_one_more()
        twin = copy.copy(self)
        twin.policy = None if self.policy is None else self.policy.fork()
        twin.states = None if self.states is None else self.states.fork()
        return twin

    def forget(self) -> None:
        """Gives up all rows of its own; they are computed again when they are asked for."""
        assert self.recomputable, "these rows cannot be computed again"
        segments = self.segments
        self.leave_segments()
        self.length, self.base, self.positions, self.synced = 0, 0, None, 0
        self.offset = 0
        self._clear_scratch()
        if self.states is not None:
            self.states = TappedStates(self.states.taps)
        if self.policy is not None:
            self.policy.begin_text(self.policy.prompt)
        self._plan_change()
        all(map(self.adopt_segment, segments))

    # --- rows beside its own

    def use(self, policy: CachePolicy, prompt: int = 0) -> None:
        """Puts a new cache under a policy. `prompt`: tokens that its text begins with."""
        self.policy = policy.fork()
        self.policy.begin_text(prompt)
        self._plan_change()

    def _plan_change(self) -> None:
        self.changes_at = NEVER
        if self.policy is not None:
            self.changes_at = self.length + max(1, self.policy.room_left(self.length))

    @property
    def plain(self) -> bool:
        """Whether ordinary attention over its own rows is all there is to it."""
        return not self.segments and (self.policy is None or self.policy.plain)

    # --- what was accepted

    def commit(self, tokens: Sequence[int]) -> None:
        """Keeps the scratch rows on the path that `tokens`, the whole branch, took below them.

        Forgets the other scratch rows. Fewer rows may be kept than were accepted: what the cache
        then lacks precedes the next tree.
        """
        accepted_nodes = accepted_path(tokens, self) if self.done >= self.needed else []
        kept_count = self.keep_nodes(accepted_nodes)
        if self.states is not None:
            self.states.keep_nodes(accepted_nodes[:kept_count])
        if self.policy is not None:
            self.policy.keep_nodes(self, accepted_nodes[:kept_count])
        if self.positions is not None:
            first_position = self.length - self.offset
            self.positions = [*self.positions, *range(first_position, first_position + kept_count)]
        self.length += kept_count
        self.base += kept_count
        self._clear_scratch()
        if self.policy is not None and self.length >= self.changes_at:
            self.policy.change_rows(self)
            self._plan_change()

    def keep_nodes(self, nodes: Sequence[int]) -> int:
        """Moves these scratch rows, a path, after the committed ones; returns how many it could.

        A cache whose rows lie elsewhere, or cannot be cut anywhere, has a `keep_nodes` of its own.
        """
        kept_prefix = next((i for i, node in enumerate(nodes) if i != node), len(nodes))
        if kept_prefix < len(nodes):
            self.reserve(self.capacity)
            self.move_rows(
                [self.base + node for node in nodes[kept_prefix:]], self.base + kept_prefix
            )
        return len(nodes)

    def settle(self, tokens: Sequence[int]) -> None:
        """Commits, unless first layers have run over this text: their rows are still needed."""
        if self.synced != len(tokens) or self.done >= self.needed:
            self.commit(tokens)

    def sync(self, tokens: Sequence[int]) -> int:
        """Takes note of the branch's tokens; returns how many it lacks, the last one aside."""
        if self.synced != len(tokens):
            self.commit(tokens)
        return len(tokens) - 1 - self.length

    # --- what is to be computed

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        """The job that answers `ask` on the branch `tokens`.

        False beside it: it only takes in pending tokens, at most `chunk`, and the ask stays open.
        """
        pending = self.sync(tokens)
        asked_layers: frozenset[Any] = frozenset(
            self.all_layers if ask.layers is None else ask.layers
        )
        if self.needed != self.all_layers and not asked_layers <= self.needed:
            self.needed, self.recomputable = self.all_layers, True
            self.forget()
            pending = self.sync(tokens)
        if pending and asked_layers != self.all_layers and self.done >= self.all_layers:
            self.commit(tokens)  # the rows of pending tokens would be written over
            pending = len(tokens) - 1 - self.length
        if ask.lasting:
            self.needed, self.recomputable = asked_layers, asked_layers == self.all_layers
        if self.beside is not None:
            self.beside.settle(tokens)  # with the states that its last forward found
        room_left = self.changes_at - self.length
        # Without its state a pending token cannot enter a layer in the middle: it is read first.
        has_states = (
            0 in asked_layers or ask.states is None or pending + len(ask.tree) <= len(ask.states)
        )
        if pending > chunk or pending >= room_left or not has_states:
            text_piece = tokens[self.length : self.length + min(chunk, room_left, pending)]
            plan = plan_part(text_piece, self.all_layers)
        else:
            ask = resume_ask(ask, tokens[self.length : -1], self)
            plan = plan_tree(ask, tokens[self.length : -1], self)
            if self.policy is not None:
                tree_depth = max(ask.tree.depths)
                tree_fits = self.policy.waits or pending + tree_depth < room_left
                assert tree_fits, f"a tree {tree_depth} deep crosses a change of the rows"
            plan.shared = count_reusable(plan, ask, self)
        job = self._make_job(plan, ask)
        self.synced = 0 if plan.part else len(tokens)
        # Of a text that comes in pieces all rows will be needed, unless a policy evicts them.
        coming_rows = max(len(plan.tokens), pending if self.policy is None else 0)
        self.reserve(self.base + coming_rows + max(0, job.follow - 1) * self.breadth)
        # Until `finish` new rows are nobody's: an interrupted forward loses them.
        self.tokens = plan.tokens[: plan.kept]
        self.parents = plan.parents[: plan.kept]
        self.trusted = min(self.trusted, plan.kept)
        self.plan = plan
        return job, not plan.part

    def _make_job(self, plan: Plan, ask: Ask) -> Job:
        shared_nodes = plan.shared
        job = self.job_type(
            cache=self,
            tokens=plan.tokens[shared_nodes:],
            scratch_positions=[self.length - self.offset + depth for depth in plan.depths],
            start=self.base + shared_nodes,
            seen=None,
            rows=[],
            first=shared_nodes - plan.pending,
            taps=() if self.states is None else self.states.taps,
        )
        if not plan.part:
            tree = ask.tree
            wanted_nodes = range(max(0, job.first), len(tree)) if ask.rows is None else ask.rows
            job.rows = [row - job.first for row in wanted_nodes]
            job.taps = tuple(sorted({*job.taps, *ask.taps}))
            job.layers = ask.layers
            job.states = None if ask.states is None else ask.states[-len(job.tokens) :]
            if job.rows == [len(job.tokens) - 1] and not (job.taps or self.policy):
                job.follow = ask.follow if tree.is_chain else 0
            if plan.goes_on:
                lower_taps = {*job.taps} & {*self.tapped} & {*range(plan.lowest)}
                job.known = {tap: self.tapped[tap][: len(plan.tokens)] for tap in lower_taps}
            if not tree.is_chain:
                job.seen = seen_by(plan.parents, plan.pending)[shared_nodes:]
        if self.feeds:
            job.features = self._read_features(job, None if plan.part else ask.features)
        return job

    def _read_features(self, job: Job, given_features: torch.Tensor | None) -> torch.Tensor:
        """(n, E) that the new nodes read: the target's states of the tokens `lag` before them.

        Those of nodes below the root (and with lag 0 its own) are not known yet and must be
        `given_features`.
        """
        assert self.beside is not None and self.beside.states is not None
        new_nodes = len(job.tokens)
        drafted_nodes = 0 if given_features is None else min(len(given_features), new_nodes)
        start = job.positions[0] - self.lag
        exact_features = self.beside.states.read_states(
            self.feeds, start, start + new_nodes - drafted_nodes
        )
        feature_parts = (
            [exact_features]
            if given_features is None or not drafted_nodes
            else [exact_features, given_features[len(given_features) - drafted_nodes :]]
        )
        features = torch.cat([part.to(exact_features) for part in feature_parts])
        assert len(features) == new_nodes, "drafted nodes below the root need `features`"
        return features

    def extend(self, tokens: Sequence[int]) -> None:
        """The forward that is finished went on by these tokens, a chain below its last node."""
        for token in tokens:
            self.parents.append(len(self.tokens) - 1)
            self.tokens.append(token)
            self.trusted = len(self.tokens)

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        """The forward of the last job is through: its rows are what they claim to be.

        `hidden`: of each of the job's taps (new nodes, E).
        """
        plan = self.plan
        assert plan is not None, "finished twice"
        if self.states is not None:  # what other layers are entered with may be written over
            runs_all = plan.done >= self.all_layers and not plan.goes_on
            tap_states = hidden if runs_all else join_states(NO_STATES, hidden, 0, False)
            self.states.write_states(plan.shared, tap_states)
        self.tokens, self.parents, self.done = plan.tokens, plan.parents, plan.done
        all_done = self.done >= self.all_layers
        self.tapped = (
            {} if all_done else join_states(self.tapped, hidden, plan.shared, plan.goes_on)
        )
        # Rows that were fed by estimates must be computed again from true states.
        self.trusted = len(plan.tokens)
        if self.feeds and not plan.part:
            self.trusted = plan.pending + self.lag
