"""A copied chain for a spine, with remembered candidates of every token for its side branches.

The spine is what followed the newest 5, 4 or 3 tokens at their most recent earlier place. At the
root and along it hang the candidates that the target last had after the same two tokens, or else
after the same one, learnt from the rows of all verified nodes, also the rejected ones, and shared
by all requests; theirs hang below them. The tree grows best first by measured acceptance: of a
spine's token by how long the match has held, whether its places agree and whether the candidates
do; of a candidate by its share of the remembered row.

Paper: Jin, Nguyen, Inoue, Goose: Anisotropic Speculation Trees for Training-Free Speculative
Decoding, arXiv:2604.02047
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the most probable nodes fill the budget, where the paper divides it by fixed shares and by widths
that fall as 1/i along the spine, so that no candidate is left out for its small share; harmonic=1
sets these widths
- a spine that its places agree on goes without branches only where it is more likely right than not
- the most recent place is copied, where the reference implementation takes the first
- a copy that reaches the end of the text goes on into itself
- rows of the prompt, which the engine does not compute, are replaced by the prompt's own pairs
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.tree_building import best_first, grow_tree
from foretell.drafters.lookup.candidates import KINDS, Store
from foretell.drafters.lookup.lookup import Index, copy_tokens
from foretell.errors import BadConfig
from foretell.ops.logits import best_logits

HELD = (4, 5, 7, 10)  # between kinds of spine tokens, by the length of the match up to them
PLACES = 8  # of an n-gram that are asked whether they agree


@dataclass
class State:
    """State of a request."""

    store: Store  # of all requests
    index: Index  # of its text
    spine: list[int] = field(default_factory=list)  # of the last draft
    match: int = 0  # tokens that matched where the spine was copied from
    agreed: bool = False  # at least two places, and all go on alike

    def spine_kind(self, spine_index: int, ids: Sequence[int]) -> int:
        """The kind of the spine's token `spine_index` (0: the first), beside these candidates."""
        agreement_level = 1  # nothing is known
        if ids:
            agreement_level = (
                2 if ids[0] == self.spine[spine_index] else int(self.spine[spine_index] in ids)
            )
        match_level = bisect_right(HELD, self.match + spine_index)
        return 2 * KINDS + (match_level * 3 + agreement_level) * 2 + self.agreed


@dataclass(frozen=True)
class Goose(Drafter):
    """All but the two switches are counts."""

    longest: Annotated[int, Range(1, 64)] = 5  # n-gram looked up first
    shortest: Annotated[int, Range(1)] = 3  # n-gram looked up last
    copy: Annotated[int, Range(1, 1024)] = 20  # tokens of a spine at most
    k: Annotated[int, Range(1, 64)] = 10  # candidates kept of each token and pair
    # levels of candidates below the root and each token of the spine
    depth: Annotated[int, Range(1, 64)] = 6
    bypass: bool = True  # whether a spine that at least two places agree on goes without branches
    harmonic: bool = False  # whether the branches along a spine get narrower as 1/i
    megabytes: Annotated[int, Range(1, 1 << 16)] = 64  # that the candidates may take

    needs = ("tree", "rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise BadConfig.field("goose:shortest", self.shortest, f"at most {self.longest}")

    def start(self, ctx: Context) -> State:
        store = ctx.shared(lambda: Store(ctx.models["target"].vocab, self.k, self.megabytes))
        # Of tokens without an entry: those that follow them in the prompt, the newest first.
        prompt_rows: dict[int, dict[int, None]] = {}
        for token, following in zip(ctx.tokens[-2::-1], ctx.tokens[:0:-1], strict=False):
            if token not in store.rows:
                candidate_row = prompt_rows.setdefault(token, {})
                if len(candidate_row) < self.k:
                    candidate_row[following] = None
        ids = np.zeros((len(prompt_rows), self.k), np.int32)
        scores = np.zeros((len(prompt_rows), self.k), np.float32)
        for row_number, candidate_row in enumerate(prompt_rows.values()):
            ids[row_number, : len(candidate_row)] = list(candidate_row)
            scores[row_number, : len(candidate_row)] = 0.5 ** np.arange(1, len(candidate_row) + 1)
        store.put_rows(list(prompt_rows), ids, scores)
        return State(store, Index(self.longest, min_length=self.shortest, keep_all=True))

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        tokens, store = ctx.tokens, state.store
        state.index.extend(tokens)
        self._find_spine(state, tokens, min(self.copy, budget - 1, ctx.depth))
        spine, kind_chances = state.spine, store.chance
        # for branches, at the root and along the spine each
        branch_room = (budget - 1 - len(spine)) / 2
        previous_token = tokens[-2] if len(tokens) > 1 else -1
        spine_tokens = {0: 0}  # node -> tokens of the spine up to it
        branch_levels = [0]  # of each node, below root or spine

        def successors(tree: TokenTree, node: int) -> Iterable[tuple[int, float]]:
            parent, token = tree.parents[node], tree.tokens[node]
            if node:
                parent_depth = spine_tokens.get(parent, len(spine))
                if parent_depth < len(spine) and spine[parent_depth] == token:
                    spine_tokens[node] = parent_depth + 1
                    branch_levels.append(0)
                else:
                    branch_levels.append(branch_levels[parent] + 1)
            if branch_levels[node] >= self.depth:
                return ()
            ids, kinds = store.candidates_after(
                tree.tokens[parent] if node else previous_token, token
            )
            spine_depth = spine_tokens.get(node, len(spine))
            if spine_depth == len(spine):
                return best_first(ids, [kind_chances[kind] for kind in kinds])
            spine_chance = kind_chances[state.spine_kind(spine_depth, ids)]
            if self.bypass and state.agreed and spine_chance > 0.5:
                return [(spine[spine_depth], spine_chance)]
            # What the spine leaves is divided among the others as their own probabilities say.
            other_chances = {
                candidate: kind_chances[kind] for candidate, kind in zip(ids, kinds, strict=True)
            }
            spine_share = other_chances.pop(spine[spine_depth], 0.0)
            scale = (1 - spine_chance) / max(sum(other_chances.values()), 1 - spine_share, 1e-9)
            branches = list(other_chances.items())
            if self.harmonic:
                branch_count = branch_room
                if spine_depth:
                    branch_count = (
                        branch_room / spine_depth / sum(1 / (i + 1) for i in range(len(spine)))
                    )
                branches = branches[: int(branch_count)]
            return best_first(
                [spine[spine_depth], *(token for token, _ in branches)],
                [spine_chance, *(chance * scale for _, chance in branches)],
            )

        tree = grow_tree(tokens[-1], successors, budget, ctx.depth, "goose")
        for node in spine_tokens:
            tree.matches[node] = state.match if node else 0
        return tree

    def _find_spine(self, state: State, tokens: list[int], max_length: int) -> None:
        """Copies what followed the newest tokens at their most recent earlier place."""
        state.spine = []
        for n in range(self.longest, self.shortest - 1, -1):
            positions = state.index.all_positions(tokens, n, PLACES)
            if positions:
                state.spine = copy_tokens(tokens, positions[0], max_length)
                state.match = n
                state.agreed = len(positions) > 1 and len({tokens[p] for p in positions}) == 1
                return

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        store, tokens = state.store, step.tree.tokens
        accepted_path = [0, *step.outcome.path]
        root_position = len(ctx.tokens) - len(step.tokens) - 1
        # Of each node: the token before it.
        previous_tokens = [ctx.tokens[root_position - 1] if root_position > 0 else -1]
        previous_tokens += [tokens[parent] for parent in step.tree.parents[1:]]
        self._learn_chances(state, step, accepted_path, previous_tokens)
        best_values, best_ids = best_logits(step.reply.logits, self.k)
        packed_rows = store.pack_rows(
            best_ids.cpu().numpy(), best_values.softmax(-1).float().cpu().numpy()
        )
        # Accepted nodes last: where a token stands twice in a tree, what really happened is
        # remembered.
        nodes = [*range(len(tokens)), *accepted_path]
        store.keep_rows([(tokens[node], packed_rows[node]) for node in nodes])
        pairs = [(previous_tokens[node] + 1) * store.vocab + tokens[node] for node in nodes]
        store.keep_rows(
            [(pair, packed_rows[node]) for pair, node in zip(pairs, nodes, strict=True)]
        )

    def _learn_chances(
        self, state: State, step: Feedback, accepted_path: list[int], previous_tokens: list[int]
    ) -> None:
        """Learns which candidates were right after each node of the accepted path.

        What followed there is known whether it was drafted or not, so nothing of it is censored.
        """
        store, spine, tokens = state.store, state.spine, step.tree.tokens
        true_tokens = [tokens[node] for node in step.outcome.path]
        if step.outcome.token is not None:  # else the text ended with the path
            true_tokens.append(step.outcome.token)
        for path_index, (node, next_token) in enumerate(
            zip(accepted_path, true_tokens, strict=False)
        ):
            ids, kinds = store.candidates_after(previous_tokens[node], tokens[node])
            for token, kind in zip(ids, kinds, strict=True):
                store.learn_kind(kind, token == next_token)
            if path_index < len(spine) and true_tokens[:path_index] == spine[:path_index]:
                store.learn_kind(state.spine_kind(path_index, ids), spine[path_index] == next_token)
        state.spine = []
