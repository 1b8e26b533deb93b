"""Accepts what the target would not have said, where a judge of its states finds it good.

A trained linear judge reads the target's own state at each drafted token, computed with that token
as input, and gives the probability that it is as good as what the target would have put there. The
standard rule verifies the draft; where it refuses, the child that the judge likes best stays if its
probability is above `delta`, and verification goes on below it. Where neither takes a child the
next token is the standard rule's. With delta=1 the text is the standard rule's, token by token.

At the authors' delta=0.5 a small model does not survive it: of 10 answers of SmolLM2-135M-Instruct
8 changed, and of 8 with known results none was right (3 by the standard rule), for 2.93 tokens a
step in place of 2.37. At 0.9, the default here, none changed and nothing was gained.

Paper: Bachmann, Anagnostidis, Pumarola, Georgopoulos, Sanakoyeu, Du, Schoenfeld, Thabet, Kohler,
Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model Alignment, arXiv:2501.19309
Guarantee: lossy: tokens of the drafter's stay in the text, at temperature 0 too, and answers change
Cost: none
Needs: any tree; hidden states of the target and a judge made for it
Trains: the judge, by `foretell train judge`; target and drafter stay as they are
Differs:
- delta is 0.9 unless it is given, where the authors take 0.5
- labels are AutoJudge's: whether the answer of a task stays the same; the paper's are people's
- trees are taken as well as chains
- no token is judged that ends or frames a text, or that the request's options exclude
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from foretell.core.context import Context
from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.tree_building import subtree_below
from foretell.core.types import Outcome
from foretell.errors import BadConfig
from foretell.verification.acceptance import Rule, verify_by_default
from foretell.verification.judge_model import MAKE, LinearJudge, judge_of, states_at_nodes


@dataclass(frozen=True)
class Judge(Rule):
    """Whoever lowers delta should count right answers before and after."""

    weights: str = ""  # file of the judge; without one, the judge that ships for the target
    # probability above which a token stays that the standard rule refuses
    delta: Annotated[float, Range(0, 1)] = 0.9

    exact = False
    greedy = False
    taps = (-1,)

    def begin(self, ctx: Context) -> Callable[[TokenTree, Target, Door, int], Outcome]:
        target = ctx.models["target"]
        make_judge = partial(judge_of, target, self.weights)
        return partial(self.verify_judged, ctx.scope_to(self).shared(make_judge, "judge"))

    def verify_judged(
        self, judge: LinearJudge, tree: TokenTree, target: Target, rng: Door, position: int
    ) -> Outcome:
        """The accepted path. Raises BadConfig where the judge reads states of another width."""
        nodes = range(1, len(tree))
        chances = dict(zip(nodes, self._goodness_of(judge, target, nodes), strict=True))
        outcome = Outcome([], None)
        node = 0
        while True:
            # The standard rule from this node on, as if the text ended there.
            subtree, subtree_nodes = subtree_below(tree, node)
            output = [*target.output, *tree.tokens_to(node)]
            rest_target = Target(target.rows[subtree_nodes], target.sampler, output, subtree)
            rest_outcome = verify_by_default(
                subtree, rest_target, rng, position + tree.depths[node]
            )
            outcome.path += [subtree_nodes[i] for i in rest_outcome.path]
            outcome.tested += [(subtree_nodes[i], accepted) for i, accepted in rest_outcome.tested]
            outcome.token = rest_outcome.token
            if rest_outcome.token is None:
                return outcome
            last_node = outcome.path[-1] if outcome.path else 0
            good_children = [
                child
                for child in dict.fromkeys(tree.tries[last_node])
                if chances[child] > self.delta
                and tree.tokens[child] not in judge.excluded
                and not target.ends(child)
                and _is_possible(target, last_node, tree.tokens[child])
            ]
            if not good_children:
                return outcome
            node = max(good_children, key=lambda child: chances[child])
            outcome.tested = [pair for pair in outcome.tested if pair[0] != node]
            outcome.tested.append((node, True))
            outcome.path.append(node)

    def _goodness_of(self, judge: LinearJudge, target: Target, nodes: range) -> list[float]:
        if not nodes:
            return []
        states = states_at_nodes(target.reply, nodes)
        if states.shape[-1] != judge.width:
            judge_source = self.weights or "what ships"
            raise BadConfig(
                f"rule 'judge' cannot verify by {judge_source}: it needs states of {judge.width} "
                f"numbers, and those of the target have {states.shape[-1]}; {MAKE} for it"
            )
        return judge.good_chances(states)


def _is_possible(target: Target, node: int, token: int) -> bool:
    """Whether the request's options leave the token possible after the node."""
    if target.sampler.greedy:
        scores = target.sampler.scores(target.rows[node], target.path(node))
        return float(scores[token]) > -float("inf")
    return float(target.p(node)[token]) > 0
