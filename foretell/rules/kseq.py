"""k-sequential selection: k independent drafts are each accepted with min(1, p / (r q)), r as small as is valid.

Where `sequential` lowers p after each refusal, here every try faces the same threshold, and the
residual law makes up for all of them at once. The drafts that begin with the accepted token go on
together.

Paper: Sun, Suresh, Ro, Beirami, Jain, Yu, SpecTr: Fast Speculative Decoding via Optimal Transport,
arXiv:2310.15141
Guarantee: exact
Cost: O(V) a node, 60 bisection steps
Needs: children drawn independently from one law
Trains: nothing
Differs: in nothing known
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.core.rng import Door
from foretell.core.sampling import Target
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.core.verify import TINY, Rule


@dataclass(frozen=True)
class Kseq(Rule):
    """Nothing to set."""

    needs = "children drawn independently from one law"

    def accepts(self, tree: TokenTree) -> bool:
        return all(
            len({id(tree.laws[c]) for c in t}) <= 1 and all(tree.laws[c] for c in t)
            for t in tree.tries
        )

    def verify(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        node, tries, outcome = 0, 0, Outcome([], -1)
        while True:
            p = target.p(node)
            children, accepted = tree.tries[node], -1
            if children:
                law = tree.laws[children[0]]
                assert law is not None
                q, k = law.dense(len(p)).to(p), len(children)
                low, high = 1.0, float(k)
                for _ in range(60):
                    r = (low + high) / 2
                    beta = float(torch.minimum(q, p / r).sum())
                    low, high = (r, high) if 1 - (1 - beta) ** k > r * beta else (low, r)
                beta = float(torch.minimum(q, p / high).sum())
                for child in children:
                    token = tree.tokens[child]
                    tries += 1
                    taken = rng.accept(
                        float(p[token]) / (high * float(q[token])), "accept", position, tries
                    )
                    outcome.tested.append((child, taken))
                    if taken:
                        accepted = child
                        break
                if accepted < 0 and beta > TINY:
                    share = (1 - (1 - beta) ** k) / beta
                    rest = (p - torch.minimum(q, p / high) * share).clamp_min(0)
                    p = rest / rest.sum() if float(rest.sum()) > TINY else p
            if accepted < 0:
                outcome.token = rng.sample(p, "target", position + tree.depths[node])
                return outcome
            outcome.path.append(accepted)
            node = accepted
