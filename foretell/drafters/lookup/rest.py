"""Drafts what followed the text's newest tokens in a corpus: the most frequent continuations.

A datastore of texts, built once with `foretell datastore`, is mapped into memory and shared by all
requests. The longest of the last `span`, ..., `least` tokens that stands in it is looked up by
binary search in a suffix array. What follows its places there, up to `follow` tokens, is counted
prefix by prefix, and the most frequent prefixes are the tree: a node's value is the share of the
places that go on by its path.

Paper: He et al., REST: Retrieval-Based Speculative Decoding, arXiv:2311.08252
Guarantee: exact
Cost: target 1
Needs: a model that takes trees, and a datastore of its tokenizer: foretell datastore TEXT...
--tokenizer MODEL --out FILE.safetensors
Trains: nothing
Try: --method rest:path=FILE.safetensors --compare
Differs:
- nothing is drafted where nothing matches, where the reference drafts a fixed token
- prefixes of equal counts are cut so that none loses its parent, and `choices` counts nodes
- ids above 65535 have room
- continuations end with their document
- of more than `hits` places those in equal distances in the suffix array are taken
- suffixes are ordered by their first 64 tokens, in one array rather than one for every 512 Mi
tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.lookup.datastore import BUILD, Datastore, load_datastore
from foretell.errors import BadConfig


@dataclass
class Match:
    """The place in the datastore where the end of one request's text stands."""

    store: Datastore
    size: int  # of the text when it was last looked up
    span: int  # at most this many of its last tokens stood there

    def find_longest(self, tokens: list[int], span: int, min_length: int) -> tuple[int, int, int]:
        """(low, high, n): the ranks of the places of the longest n of the last `span`, ...,
        `min_length` tokens; n 0: none.

        If n tokens stand somewhere then so do fewer, so the longest is found by bisection; and t
        more tokens make it longer by t at most, so where nothing stood there nothing is searched
        until `min_length` tokens are new.
        """
        max_length = min(span, len(tokens), self.span + len(tokens) - self.size)
        first_rank, end_rank = 0, 0
        best_length, length_limit, probe_length = min_length - 1, max_length, max_length
        while best_length < length_limit:
            start_rank, stop_rank = self.store.find_ranks(tokens[-probe_length:])
            if stop_rank:
                best_length, first_rank, end_rank = probe_length, start_rank, stop_rank
            else:
                length_limit = probe_length - 1
            probe_length = (best_length + length_limit + 1) // 2
        self.size = len(tokens)
        self.span = min(best_length, max_length)
        return first_rank, end_rank, best_length if end_rank else 0


def frequent_prefixes(
    store: Datastore, positions: np.ndarray, follow: int, max_nodes: int
) -> list[tuple[int, int, int]]:
    """(parent, token, count) of the `max_nodes` most frequent prefixes of what stands at the sorted
    `positions`.

    Entry i is node i + 1 and parents come before their children; of equal counts the shorter prefix
    comes first, then the smaller one. Sorted places have equal prefixes side by side, so each
    prefix is a run in its row.
    """
    place_count = len(positions)
    depths = np.arange(follow)[:, None]
    last_position = len(store.tokens) - 1  # which is a document's end
    token_block = store.tokens[np.minimum(positions + depths, last_position)]  # (follow, places)
    begins_run = np.ones(token_block.shape, bool)  # where a run begins
    np.not_equal(token_block[:, 1:], token_block[:, :-1], out=begins_run[:, 1:])
    np.logical_or.accumulate(begins_run, out=begins_run)
    past_end = np.logical_or.accumulate(token_block == store.vocab)  # from the document's end on
    run_starts = np.flatnonzero(begins_run)
    counts = np.diff(run_starts, append=token_block.size)
    counts[past_end.ravel()[run_starts]] = 0
    # So many of the counts are 1 that sorting all of them would take longer than the rest.
    counts_above = np.bincount(counts)[::-1].cumsum()[
        ::-1
    ]  # above[c]: prefixes of at least c places
    border_count = max(1, int(np.searchsorted(-counts_above, -max_nodes, side="right")) - 1)
    chosen_runs = np.concatenate(
        [np.flatnonzero(counts > border_count), np.flatnonzero(counts == border_count)]
    )
    chosen_runs = chosen_runs[:max_nodes]
    chosen_runs = chosen_runs[np.lexsort((chosen_runs, -counts[chosen_runs]))]
    chosen_starts = run_starts[chosen_runs]
    # The parent is the run in the row above that the first of its places stands in.
    parents = np.searchsorted(run_starts, chosen_starts - place_count, side="right") - 1
    node_of_run = {run: node for node, run in enumerate(chosen_runs.tolist(), 1)}
    nodes = [
        node_of_run[run] if start >= place_count else 0
        for start, run in zip(chosen_starts.tolist(), parents.tolist(), strict=True)
    ]
    tokens = token_block.ravel()[chosen_starts].tolist()
    return list(zip(nodes, tokens, counts[chosen_runs].tolist(), strict=True))


@dataclass(frozen=True)
class Rest(Drafter):
    """All but `path` are counts."""

    path: str = ""  # the datastore's file
    choices: Annotated[int, Range(1, 1024)] = 64  # nodes of a tree at most
    span: Annotated[int, Range(1, 32)] = 16  # longest run of tokens looked up
    least: Annotated[int, Range(1, 32)] = 2  # shortest run of tokens looked up
    hits: Annotated[int, Range(1, 1_000_000)] = 5000  # places whose continuations are counted
    follow: Annotated[int, Range(1, 32)] = 10  # tokens of a continuation

    needs = ("tree",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.span:
            raise BadConfig.field("rest:least", self.least, f"at most span={self.span}")
        if not self.path:
            raise BadConfig(
                f"rest:path is not given: build a datastore with {BUILD}, "
                "then use rest:path=FILE.safetensors"
            )

    def start(self, ctx: Context) -> Match:
        def open_datastore() -> Datastore:
            store = load_datastore(self.path)
            store.check_model(ctx.models["target"].vocab, ctx.request.text)
            return store

        return Match(ctx.shared(open_datastore), 0, self.span)

    def propose(self, ctx: Context, state: Match, budget: int) -> TokenTree:
        tokens = ctx.tokens
        tree = TokenTree(tokens[-1])
        max_nodes = min(self.choices, budget - 1)
        max_depth = min(self.follow, ctx.depth)
        if max_nodes < 1 or max_depth < 1:
            return tree
        first_rank, end_rank, n = state.find_longest(tokens, self.span, self.least)
        if not n:
            return tree
        positions = state.store.places(first_rank, end_rank, self.hits)
        nodes = [0]
        for parent, token, count in frequent_prefixes(
            state.store, positions + n, max_depth, max_nodes
        ):
            probability = count / len(positions)
            nodes.append(tree.add(nodes[parent], token, value=probability, source="rest", match=n))
        return tree
