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

import numpy as np

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.tree import TokenTree
from foretell.drafters.lookup.datastore import BUILD, Datastore, load
from foretell.errors import BadConfig

RANGES = {
    "choices": (1, 1024),
    "span": (1, 32),
    "least": (1, 32),
    "hits": (1, 1_000_000),
    "follow": (1, 32),
}


@dataclass
class Match:
    """Where the end of one request's text stands in the datastore."""

    store: Datastore
    size: int  # of the text when it was last looked up
    span: int  # at most this many of its last tokens stood there

    def longest(self, tokens: list[int], span: int, least: int) -> tuple[int, int, int]:
        """(low, high, n): the ranks of the places of the longest n of the last `span`, ..., `least`
        tokens; n 0: none.

        If n tokens stand somewhere then so do fewer, so the longest is found by bisection; and t
        more tokens make it longer by t at most, so where nothing stood there nothing is searched
        until `least` tokens are new.
        """
        top = min(span, len(tokens), self.span + len(tokens) - self.size)
        low, high = 0, 0
        best, limit, probe = least - 1, top, top
        while best < limit:
            first, end = self.store.find(tokens[-probe:])
            if end:
                best, low, high = probe, first, end
            else:
                limit = probe - 1
            probe = (best + limit + 1) // 2
        self.size = len(tokens)
        self.span = min(best, top)
        return low, high, best if high else 0


def prefixes(
    store: Datastore, places: np.ndarray, follow: int, size: int
) -> list[tuple[int, int, int]]:
    """(parent, token, count) of the `size` most frequent prefixes of what stands at the sorted
    `places`.

    Entry i is node i + 1 and parents come before their children; of equal counts the shorter prefix
    comes first, then the smaller one. Sorted places have equal prefixes side by side, so each
    prefix is a run in its row.
    """
    width = len(places)
    depths = np.arange(follow)[:, None]
    last = len(store.tokens) - 1  # which is a document's end
    block = store.tokens[np.minimum(places + depths, last)]  # (follow, places)
    begins = np.ones(block.shape, bool)  # where a run begins
    np.not_equal(block[:, 1:], block[:, :-1], out=begins[:, 1:])
    np.logical_or.accumulate(begins, out=begins)
    over = np.logical_or.accumulate(block == store.vocab)  # from the document's end on
    starts = np.flatnonzero(begins)
    counts = np.diff(starts, append=block.size)
    counts[over.ravel()[starts]] = 0
    # So many of the counts are 1 that sorting all of them would take longer than the rest.
    above = np.bincount(counts)[::-1].cumsum()[::-1]  # above[c]: prefixes of at least c places
    border = max(1, int(np.searchsorted(-above, -size, side="right")) - 1)
    chosen = np.concatenate([np.flatnonzero(counts > border), np.flatnonzero(counts == border)])
    chosen = chosen[:size]
    chosen = chosen[np.lexsort((chosen, -counts[chosen]))]
    begin = starts[chosen]
    # The parent is the run in the row above that the first of its places stands in.
    parents = np.searchsorted(starts, begin - width, side="right") - 1
    node_of_run = {run: node for node, run in enumerate(chosen.tolist(), 1)}
    nodes = [
        node_of_run[run] if start >= width else 0
        for start, run in zip(begin.tolist(), parents.tolist(), strict=True)
    ]
    tokens = block.ravel()[begin].tolist()
    return list(zip(nodes, tokens, counts[chosen].tolist(), strict=True))


@dataclass(frozen=True)
class Rest(Drafter):
    """All but `path` are counts."""

    path: str = ""  # the datastore's file
    choices: int = 64  # nodes of a tree at most
    span: int = 16  # longest run of tokens looked up
    least: int = 2  # shortest run of tokens looked up
    hits: int = 5000  # places whose continuations are counted
    follow: int = 10  # tokens of a continuation

    needs = ("tree",)

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadConfig.field(f"rest:{name}", value, f"between {low} and {high}")
        if self.least > self.span:
            raise BadConfig.field("rest:least", self.least, f"at most span={self.span}")
        if not self.path:
            raise BadConfig(
                f"rest:path is not given: build a datastore with {BUILD}, "
                "then use rest:path=FILE.safetensors"
            )

    def start(self, ctx: Context) -> Match:
        def opened() -> Datastore:
            store = load(self.path)
            store.check(ctx.models["target"].vocab, ctx.request.text)
            return store

        return Match(ctx.shared(opened), 0, self.span)

    def propose(self, ctx: Context, state: Match, budget: int) -> TokenTree:
        tokens = ctx.tokens
        tree = TokenTree(tokens[-1])
        size = min(self.choices, budget - 1)
        follow = min(self.follow, ctx.depth)
        if size < 1 or follow < 1:
            return tree
        low, high, n = state.longest(tokens, self.span, self.least)
        if not n:
            return tree
        places = state.store.places(low, high, self.hits)
        nodes = [0]
        for parent, token, count in prefixes(state.store, places + n, follow, size):
            share = count / len(places)
            nodes.append(tree.add(nodes[parent], token, value=share, source="rest", match=n))
        return tree
