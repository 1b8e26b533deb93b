"""Drafts that fit a constraint: without tokens that may not follow, and with those that have to.

No token of the text changes by it, only what is computed: verification would have refused the
nodes that go, and judges those that come like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.core.tree import TokenTree

if TYPE_CHECKING:
    from foretell.core.context import Context

FORCED_TOKENS = 16  # tokens without a choice that are drafted at once, at most


def fit_constraint(
    ctx: Context, tree: TokenTree, never_cut: bool, takes_any_tree: bool
) -> TokenTree:
    """The proposed tree as the constraint of ctx.branch would have it.

    `never_cut`: it is verified as it comes, and not cut. `takes_any_tree`: its rule takes any tree.
    """
    guide = ctx.sampler.guide
    if guide is None:
        return tree
    # Distributions that tokens are drawn from have the constraint: `Sampler.scores` masks them.
    if not (tree.has_draws or never_cut):
        fitting_nodes = [0]
        for node in range(1, len(tree)):
            if tree.parents[node] in fitting_nodes and guide.may_draft(
                [*ctx.output, *tree.tokens_to(node)]
            ):
                fitting_nodes.append(node)
        tree = tree.keep(fitting_nodes[1:])
    if takes_any_tree and (len(tree) == 1 or "tree" in ctx.models["target"].caps):
        node = 0
        for token in guide.forced(ctx.output)[: min(FORCED_TOKENS, ctx.depth)]:
            node = tree.add(node, token, value=1.0, source="constraint")
    return tree
