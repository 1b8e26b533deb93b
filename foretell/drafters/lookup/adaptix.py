"""Searches a map of tri-grams for the continuations that the text makes likely.

For every pair of tokens the map holds the weights of what followed it: shares of the occurrences in
a prompt, and a little more for every step in which the tri-gram is among the newest tokens. From
the last pair a tree search walks the map, exploring by weight, and the beginnings it visited most
are proposed, each with its likeliest next token.

Paper: Liu et al., Adaptive Draft-Verification for Efficient Large Language Model Decoding (ADED),
arXiv:2407.12021
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the map starts from the prompts rather than from a corpus counted beforehand
- the map is bounded, and the limit of 12 successors holds while it learns, so that a new one takes
the place of the lightest
- play-outs use the same random numbers in every step, so a search depends on nothing but the map
- no tri-gram of a step longer than the window is passed over
- search=false grows the tree best first from the same weights, which takes a fraction of the time
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.tree_building import grow_tree
from foretell.drafters.lookup.trigrams import Pair, Trigrams

WINDOW = 16  # newest tokens whose tri-grams gain weight in a step
C1, C2 = 32.0, 8.0  # of the search: how much it explores


class Search:
    """A Monte Carlo tree search over the map, from one pair on.

    By node: the pair of tokens that ends there, the parent, the weight of the last token, how often
    it was visited, and the sum of the rewards.
    """

    def __init__(self, store: Trigrams, pair: Pair, depth: int):
        self.rows = store.rows
        self.depth = depth
        self.draw = random.Random(0).random
        self.pairs = [pair]
        self.parents = [-1]
        self.children: list[list[int]] = [[]]
        self.weights = [0.0]
        self.visits = [0]
        self.rewards = [0.0]

    def run_round(self) -> None:
        """Selects a node, expands it, plays on from there, and notes the reward along its path."""
        node, level, reward = self._select_node()
        row = self.rows.get(self.pairs[node])
        if level < self.depth - 1 and row:
            node = self._expand_node(node, row)
            level += 1
            reward += self.weights[node]
        reward += self._play_out(self.pairs[node], level)
        while node >= 0:
            self.visits[node] += 1
            self.rewards[node] += reward
            node = self.parents[node]

    def _select_node(self) -> tuple[int, int, float]:
        """(node without children, its level, 1 + the weights on its path): the most promising."""
        node, level, reward = 0, 0, 1.0
        visits, rewards, weights = self.visits, self.rewards, self.weights
        children = self.children
        while children[node]:
            visit_total = visits[node]
            exploration = (C1 + math.log((visit_total + C2 + 1) / C2)) * math.sqrt(visit_total)
            best_score = -1.0
            for child in children[node]:
                visit_count = visits[child]
                if not visit_count:
                    node = child
                    break
                child_score = rewards[child] / visit_count + exploration * weights[child] / (
                    1 + visit_count
                )
                if child_score > best_score:
                    node, best_score = child, child_score
            level += 1
            reward += weights[node]
        return node, level, reward

    def _expand_node(self, node: int, row: dict[int, float]) -> int:
        """Gives the node all its successors; returns the last of them."""
        last_token = self.pairs[node][1]
        first_child = len(self.pairs)
        self.children[node] += range(first_child, first_child + len(row))
        self.pairs += [(last_token, token) for token in row]
        self.parents += [node] * len(row)
        self.children += [[] for _ in row]
        self.weights += row.values()
        self.visits += [0] * len(row)
        self.rewards += [0.0] * len(row)
        return len(self.pairs) - 1

    def _play_out(self, pair: Pair, level: int) -> float:
        """The weights on a path drawn by weight from here to the full depth."""
        reward = 0.0
        while level < self.depth - 1 and (row := self.rows.get(pair)):
            remaining_weight = self.draw() * sum(row.values())
            for token, weight in row.items():  # noqa: B007
                remaining_weight -= weight
                if remaining_weight < 0:
                    break
            pair = (pair[1], token)
            level += 1
            reward += weight
        return reward


def explore_map(
    store: Trigrams, pair: Pair, max_nodes: int, depth: int, rounds: int, paths: int
) -> TokenTree:
    """The tree of at most `max_nodes` nodes and `depth` levels that the search finds below `pair`.

    It holds the `paths` most visited nodes, each with its best successor, as far as they have the
    highest values.
    """
    search = Search(store, pair, depth)
    if pair in store.rows:
        for _ in range(rounds):
            search.run_round()
    visits, pairs = search.visits, search.pairs
    by_visits = sorted(range(len(pairs)), key=lambda node: -visits[node])
    node_values = {0: 1.0}
    successor_chances: dict[
        int, dict[int, float]
    ] = {}  # node -> what the map says of its successors
    candidates: list[tuple[float, int, int, int]] = []  # (-value, node, parent, token)
    for node in by_visits[:paths]:
        if node:
            parent, token = search.parents[node], pairs[node][1]
            # Its share of the visits, and what the map says as one visit more, so that no chance
            # is 0.
            known_weight = sum(successor_chances[parent].values())
            probability = (visits[node] * known_weight + successor_chances[parent][token]) / (
                visits[parent] + 1
            )
            node_values[node] = node_values[parent] * probability
            candidates.append((-node_values[node], node, parent, token))
        successors = store.successors_of(pairs[node])
        successor_chances[node] = dict(successors)
        for token, probability in successors[:1]:
            candidates.append((-node_values[node] * probability, len(pairs), node, token))
    tree = TokenTree(pair[1])
    tree_nodes = {0: 0}  # node of the search -> node of the tree
    for value, node, parent, token in sorted(candidates):
        if len(tree) == max_nodes:
            break
        tree_nodes[node] = tree.add(tree_nodes[parent], token, value=-value, source="adaptix")
    return tree


@dataclass(frozen=True)
class Adaptix(Drafter):
    """All but `search` and `megabytes` are counts."""

    # tokens of a draft, the last of them added to what the search found
    depth: Annotated[int, Range(1, 64)] = 4
    rounds: Annotated[int, Range(1, 100_000)] = 150  # of the search
    paths: Annotated[int, Range(1, 1024)] = 24  # beginnings it keeps, the empty one among them
    search: bool = True  # false: best first, which takes less time
    megabytes: Annotated[int, Range(1, 1 << 20)] = 64  # of the map

    needs = ("tree",)

    def start(self, ctx: Context) -> Trigrams:
        store = ctx.shared(lambda: Trigrams(ctx.models["target"].vocab, self.megabytes << 20))
        store.read_text(ctx.tokens)
        store.note_text(ctx.tokens[-WINDOW:])
        return store

    def propose(self, ctx: Context, state: Trigrams, budget: int) -> TokenTree:
        tokens = ctx.tokens
        depth = min(self.depth, ctx.depth)
        if len(tokens) < 2 or depth < 1:
            return TokenTree(tokens[-1])
        pair = (tokens[-2], tokens[-1])
        if self.search:
            return explore_map(state, pair, budget, depth, self.rounds, self.paths)

        def successors(tree: TokenTree, node: int) -> list[tuple[int, float]]:
            previous_token = tree.tokens[tree.parents[node]] if node else pair[0]
            return state.successors_of((previous_token, tree.tokens[node]))

        return grow_tree(tokens[-1], successors, budget, depth, "adaptix")

    def observe(self, ctx: Context, state: Trigrams, step: Feedback) -> None:
        state.note_text(ctx.tokens[-max(WINDOW, len(step.tokens) + 2) :])
