"""A draft model's chain goes on as long as a trained head expects all of it to be accepted.

The draft model continues the text token by token, each drawn from its own distribution. A head
reads the hidden state that leaves the model's last layer at every drafted token and gives the
probability that the token is accepted if those before it are. The chain ends where one minus the
product of these probabilities is above `threshold`, but has `shortest` to `longest` tokens (fewer
only where the text ends, or the budget). The head lags a token behind: what it says of a token is
known once the next one is drawn, which then stays. Without a head, `estimate` takes its place by
the distribution that a token is drawn from: `confidence`, the chance of its best token, or
`entropy`, e to the minus entropy.

Paper: Huang, Guo, Wang, SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths,
arXiv:2405.19715
Guarantee: exact
Cost: target 1, draft longest at most
Needs: a draft model with the target's tokenizer and, for the head, hidden states
Trains: the head, by `foretell train acceptance-head`; the draft model stays as it is
Try: --method specdec-pp:estimate=confidence --compare
Differs:
- every block of the head has weights of its own; the published code repeats one block
- the head reads the state before the model's last norm, scaled to a mean square of 1
- `estimate` without a head is ours, to compare with
- the policy may allow fewer tokens than `longest`, and even fewer than `shortest`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.core.settings import OneOf, Range
from foretell.core.tree import Law, TokenTree
from foretell.core.types import Ask, Reply
from foretell.drafters.model.acceptance_head import MAKE, AcceptanceHead, load_acceptance_head
from foretell.drafters.model.reader import DraftReader
from foretell.errors import BadConfig, Unsupported

ESTIMATES = ("head", "confidence", "entropy")


@dataclass
class State:
    """State of one request."""

    reader: DraftReader
    head: AcceptanceHead | None
    taps: tuple[int, ...]  # of the draft model, what the head reads


@dataclass(frozen=True)
class SpecdecPp(Drafter):
    """Lengths are in tokens; `threshold` is a probability."""

    head: str = ""  # file of the trained head
    estimate: Annotated[str, OneOf(ESTIMATES)] = "head"  # head; without one: confidence or entropy
    # a chain ends where some rejection is more likely than this
    threshold: Annotated[float, Range(0, 1)] = 0.3
    shortest: Annotated[int, Range(1)] = 2  # tokens of a chain before that counts
    longest: Annotated[int, Range(1, 256)] = 20  # tokens of a chain at most

    models = ("draft",)
    draws = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.estimate == "head") != bool(self.head):
            given_options = f"specdec-pp:estimate={self.estimate},head={self.head}"
            cure = "or take estimate=confidence or entropy alone"
            raise BadConfig(
                f"{given_options}: estimate=head needs the file of a head; {MAKE}, {cure}"
            )
        if self.shortest > self.longest:
            allowed_range = f"at most longest={self.longest}"
            raise BadConfig.field("specdec-pp:shortest", self.shortest, allowed_range)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        draft_model = models.get("draft")
        if self.head and draft_model is not None and "taps" not in draft_model.caps:
            cure = "use estimate=confidence or estimate=entropy, which read none"
            raise Unsupported.missing_capability(
                "specdec-pp", draft_model.name, "hidden states", cure
            )
        return {}

    def start(self, ctx: Context) -> State:
        reader = DraftReader(ctx)
        if not self.head:
            return State(reader, None, ())
        device = reader.model.device
        head = ctx.shared(lambda: load_acceptance_head(self.head).to(device), "head")
        return State(reader, head, (len(reader.model.layout),))

    def steps(self, ctx: Context, state: State, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        reader = state.reader
        if not reader.can_read(ctx.tokens):
            return tree
        node = 0
        all_accepted = 1.0  # probability that all drafted tokens are, as far as it is known
        for chain_length in range(1, min(self.longest, budget - 1, reader.max_depth(ctx)) + 1):
            reply = yield Ask(tree, "draft", ctx.branch, rows=[node], taps=state.taps)
            if node and state.head is not None:
                all_accepted *= self._judge_node(state, reply, node)
            (row,) = reader.resized_rows(reply)
            node, q = self._draw(ctx, tree, node, row, chain_length)
            all_accepted *= self._expect_acceptance(q)
            # Of the next token the decision sees nothing, so that its distribution stays what it
            # is.
            if ctx.ends(tree, node) or (
                chain_length >= self.shortest and 1 - all_accepted > self.threshold
            ):
                break
        return tree

    def _judge_node(self, state: State, reply: Reply, node: int) -> float:
        """The probability that `node` is accepted, by the head. Raises BadConfig where it is
        another model's.
        """
        assert state.head is not None
        states = reply.hidden[state.taps[0]]
        if states.shape[-1] != state.head.width:
            model = state.reader.model.name
            widths = f"{state.head.width} numbers and those of {model} have {states.shape[-1]}"
            raise BadConfig(f"specdec-pp:head={self.head}: reads states of {widths}; {MAKE}")
        row_index = reply.new.index(node)
        return float(state.head.accept_chance(states[row_index : row_index + 1]))

    def _expect_acceptance(self, q: torch.Tensor) -> float:
        """The probability that a token of the distribution q (V,) is accepted, where there is no
        head.
        """
        if self.estimate == "confidence":
            return float(q.max())
        if self.estimate == "entropy":
            return math.exp(-float(torch.special.entr(q).sum()))
        return 1.0

    def _draw(
        self, ctx: Context, tree: TokenTree, node: int, row: torch.Tensor, key: int
    ) -> tuple[int, torch.Tensor]:
        """Adds the token after `node` by row (V,); returns its node, and the draft model's
        distribution (V,) there, at temperature 0 that of temperature 1.
        """
        sampler = ctx.sampler
        output = [*ctx.output, *tree.tokens_to(node)]
        if sampler.greedy:
            q = sampler.scores(row, output).softmax(-1)
            token, law = int(q.argmax()), None
        else:
            q = sampler.law(row, output)
            token, law = ctx.rng.sample(q, "draft", len(ctx.output), key), Law(q)
        value = tree.values[node] * float(q[token])
        return tree.add(node, token, law, value, "specdec-pp"), q
