"""The rows a model keeps of one branch of a request.

    rows   0 ........ base-1 | base .......... base+len(scratch)-1 | free, grown by doubling
           committed tokens  | the last forest: pending tokens and tree |

This file knows rows, tokens and which of them belong together; it knows no model. A cache is told
the branch's tokens and finds out by itself what it already has: it walks the scratch rows by token
and keeps those of the path that was committed. So a drafter's cache that is ahead, behind or on
another path needs no bookkeeping. The last committed token is never kept: it is the root of the
next tree and is computed again, which is what gives its row of logits.

How many tokens a cache has taken in (`length`) and how many rows it holds of them (`base`) are two
things: a shared prefix (`segments`) or a policy that evicts makes the latter smaller.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from foretell.core.tree import ancestors, visible
from foretell.core.types import Ask
from foretell.memory.buffers import Shape
from foretell.memory.job import Job
from foretell.memory.plan import Plan, plan_part, plan_tree, reusable
from foretell.memory.policy import NEVER, CachePolicy
from foretell.memory.shared import SharedRows
from foretell.memory.states import TappedStates

LONG = 64  # pending tokens above which a mask is not worth remembering


NO_STATES: Mapping[int, torch.Tensor] = {}


class Cache(SharedRows):
    """Rows of one branch for one model."""

    job_type: type[Job] = Job
    recomputable = True  # whether its rows can be computed again from the tokens

    def __init__(
        self,
        layout: Sequence[Shape | None],
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = 256,
    ):
        super().__init__(layout, dtype, device, capacity)
        self.all_layers = frozenset(range(len(layout)))
        self.length = 0  # committed tokens taken in
        self.base = 0  # rows held of them
        self.positions: list[int] | None = None  # of these rows, where some were evicted
        self.policy: CachePolicy | None = None
        self.changes_at = NEVER  # length at which the policy changes the rows next
        self.states: TappedStates | None = None  # the hidden states it keeps of its tokens
        self.beside: Cache | None = None  # the target's cache whose states its model feeds on
        self.feeds: tuple[int, ...] = ()  # taps of that
        self.inputs: Mapping[str, Any] = {}  # the request's
        self._clear_scratch()
        self.synced = 0  # tokens of the branch at the last `prepare`; 0: only a part of a text

    def _clear_scratch(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []  # -1 is the committed text
        self.done: frozenset[int] = frozenset()  # layers whose scratch rows are written
        self.trusted = 0  # scratch rows before this one may be kept; later ones are estimates
        self.plan: Plan | None = None  # what the running forward makes of the scratch rows

    def reserve(self, rows: int) -> None:
        """Makes the buffers this cache's alone and at least `rows` long."""
        self.grow(rows, self.base + len(self.tokens))

    def fork(self) -> Cache:
        """A copy that shares the buffers until one of the two writes."""
        self.read_by_one_more()
        twin = copy.copy(self)
        twin.policy = copy.copy(self.policy)
        twin.states = None if self.states is None else self.states.fork()
        return twin

    @property
    def halfway(self) -> bool:
        """Whether a forward stopped between two layers, and may go on from its states."""
        return bool(self.done) and self.done != self.all_layers

    def forget(self) -> None:
        """Gives up all rows of its own; they are computed again when they are asked for."""
        assert self.recomputable, "these rows cannot be computed again"
        segments = self.segments
        self.leave_segments()
        self.length, self.base, self.positions, self.synced = 0, 0, None, 0
        self._clear_scratch()
        if self.states is not None:
            self.states = TappedStates(self.states.taps)
        self._plan_change()
        for segment in segments:
            self.adopt(segment)

    # --- rows beside its own

    def use(self, policy: CachePolicy) -> None:
        """Puts a new cache under a policy."""
        self.policy = copy.copy(policy)
        self._plan_change()

    def _plan_change(self) -> None:
        self.changes_at = NEVER
        if self.policy is not None:
            self.changes_at = self.length + max(1, self.policy.room(self.length))

    def compact(self, rows: Iterable[int]) -> None:
        """Keeps these of the committed rows, in order, and gives up the others."""
        assert not self.tokens, "rows are evicted between forwards"
        keep = list(rows)
        self.positions = [self.row_positions()[row] for row in keep]
        self.reserve(self.base)
        self.move(keep, 0)
        self.base = len(keep)

    def row_positions(self) -> Sequence[int]:
        """Of the committed rows, their tokens' positions in the text."""
        if self.positions is not None:
            return self.positions
        return range(self.length - self.base, self.length)

    @property
    def plain(self) -> bool:
        """Whether ordinary attention over its own rows is all there is to it."""
        return not self.segments and (self.policy is None or self.policy.plain)

    # --- what was accepted

    def commit(self, tokens: Sequence[int]) -> None:
        """Keeps the scratch rows on the path that `tokens`, the whole branch, took below them.

        Forgets the other scratch rows. It may keep fewer rows than were accepted: what it then
        lacks precedes the next tree.
        """
        path = self._accepted(tokens) if self.done == self.all_layers else []
        kept = self.keep(path)
        if self.states is not None:
            self.states.keep(path[:kept])
        if self.positions is not None:
            self.positions = [*self.positions, *range(self.length, self.length + kept)]
        self.length += kept
        self.base += kept
        self._clear_scratch()
        if self.policy is not None and self.length == self.changes_at:
            self.policy.change(self)
            self._plan_change()

    def _accepted(self, tokens: Sequence[int]) -> list[int]:
        """The scratch rows that hold the branch's next tokens, one below the other."""
        path: list[int] = []
        node = -1
        child = 0
        for token in tokens[self.length : len(tokens) - 1]:
            while child < self.trusted:
                if self.parents[child] == node and self.tokens[child] == token:
                    break
                child += 1
            if child >= self.trusted:
                break
            path.append(child)
            node = child
            child += 1
        return path

    def keep(self, nodes: Sequence[int]) -> int:
        """Moves these scratch rows, a path, behind the committed ones; returns how many it could.

        A cache whose rows lie elsewhere, or cannot be cut anywhere, has a `keep` of its own.
        """
        moved = next((i for i, node in enumerate(nodes) if i != node), len(nodes))
        if moved < len(nodes):
            self.reserve(self.capacity)
            self.move([self.base + node for node in nodes[moved:]], self.base + moved)
        return len(nodes)

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
        if self.beside is not None:
            self.beside.commit(tokens)  # with the states that its last forward found
        room = self.changes_at - self.length
        if pending > chunk or pending >= room:
            piece = tokens[self.length : self.length + min(chunk, room)]
            plan = plan_part(piece, self.all_layers)
        else:
            plan = plan_tree(ask, tokens[self.length : -1], self)
            if self.policy is not None:
                depth = max(ask.tree.depths)
                assert pending + depth < room, f"a tree {depth} deep crosses a change of the rows"
            plan.shared = reusable(plan, ask, self)
        job = self._job(plan, ask)
        self.synced = 0 if plan.part else len(tokens)
        self.reserve(self.base + len(plan.tokens))
        # Until `finish` new rows are nobody's: an interrupted forward loses them.
        self.tokens = plan.tokens[: plan.shared]
        self.parents = plan.parents[: plan.shared]
        self.trusted = min(self.trusted, plan.shared)
        self.plan = plan
        return job, not plan.part

    def _job(self, plan: Plan, ask: Ask) -> Job:
        shared = plan.shared
        job = self.job_type(
            cache=self,
            tokens=plan.tokens[shared:],
            scratch_positions=[self.length + depth for depth in plan.depths],
            start=self.base + shared,
            seen=None,
            rows=[],
            first=shared - plan.pending,
            taps=() if self.states is None else self.states.taps,
        )
        if not plan.part:
            tree = ask.tree
            wanted = range(max(0, job.first), len(tree)) if ask.rows is None else ask.rows
            job.rows = [row - job.first for row in wanted]
            job.taps = tuple(sorted({*job.taps, *ask.taps}))
            job.layers, job.states = ask.layers, ask.states
            if not tree.is_chain:
                mask = ancestors if plan.pending < LONG else visible
                job.seen = mask(tuple(plan.parents))[shared:]
        if self.beside is not None:
            job.features = self._features(job, None if plan.part else ask.features)
        return job

    def _features(self, job: Job, given: torch.Tensor | None) -> torch.Tensor:
        """(n, E) that the new nodes read: the target's states of the tokens before them.

        Those of nodes below the root are not known yet and must be `given`.
        """
        assert self.beside is not None and self.beside.states is not None
        new = len(job.tokens)
        drafted = 0 if given is None else min(len(given), new)
        start = job.positions[0] - 1
        exact = self.beside.states.read(self.feeds, start, start + new - drafted)
        parts = [exact] if given is None or not drafted else [exact, given[len(given) - drafted :]]
        features = torch.cat([part.to(exact) for part in parts])
        assert len(features) == new, "drafted nodes below the root need `features`"
        return features

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        """The forward of the last job is through: its rows are what they claim to be.

        `hidden`: of each of the job's taps (new nodes, E).
        """
        plan = self.plan
        assert plan is not None, "finished twice"
        if self.states is not None:
            self.states.write(plan.shared, hidden)
        self.tokens, self.parents, self.done = plan.tokens, plan.parents, plan.done
        # Rows below the root that were fed by estimates must be computed again from true states.
        self.trusted = len(plan.tokens)
        if self.beside is not None and not plan.part:
            self.trusted = plan.pending + 1
