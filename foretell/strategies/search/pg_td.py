"""PG-TD: a tree search over tokens finds the program that its tests value most.

Each rollout goes down a tree of tokens, in which every text has its `k` likeliest next tokens as
children. At each text it takes the child with the highest Q + c(N) P sqrt(ln N) / (1 + n): Q is the
best reward found after the child, P the model's chance for it among the k, n and N say how often
the child and the text were passed, and c(N) = ln((N + base + 1) / base) + c. The first text that is
new is finished greedily, the reward of the whole is what the rollout found, and all texts on the
way remember the best of it. The answer is the text of the highest reward, the first of equal ones.
Only few rollouts compute anything anew: a finished text is that of all its beginnings as well, and
the rows after its tokens are kept for the texts that begin there, as is its reward.

Paper: Zhang et al., Planning with Large Language Models for Code Generation, arXiv:2303.05510
Guarantee: lossy: the reward decides beside the model, on purpose
Cost: target 1
Needs: a reward, such as `tests`, see `foretell methods`; a tokenizer
Trains: nothing
Try: --method pg-td --reward tests:path=FILE.jsonl
Differs:
- texts are finished greedily; the paper's code may also take the best of several beams, or samples
- any reward of whole texts serves, and with `enough` the search ends once one is as good as that
- 16 rollouts are the released code's example, the paper's tables have up to 256
- no drafter is asked: the rows after all tokens of a text are needed for the tree
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from foretell.core.context import Context
from foretell.core.settings import Range
from foretell.core.spending import Spent
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Commit, Drop, Finish, Fork, Kept, Message, Reply, Steps
from foretell.errors import BadConfig
from foretell.rewards.base import Reward, needs_text, score_outputs
from foretell.speculation.strategy import Strategy
from foretell.strategies.log_probs import log_probs
from foretell.strategies.search.beam_search import refuse_for_search
from foretell.strategies.search.ucb import Node, Text, descend_tree, make_edges, propagate_reward

# the likeliest next tokens, each with its probability among them
NextTokens = list[tuple[int, float]]


@dataclass(frozen=True)
class PgTd(Strategy):
    """Greedy decoding with rollouts=1."""

    reward: Reward | None = None  # what whole texts are worth; there must be one
    rollouts: Annotated[int, Range(1, 100_000)] = 16  # ways down the tree
    k: Annotated[int, Range(1, 64)] = 3  # next tokens of a text
    # how much the model's probabilities count beside rewards
    c: Annotated[float, Range(0, 1000000.0)] = 4.0
    # the larger, the later they count more for texts that were passed often
    base: Annotated[float, Range(0, 1000000000.0, open_low=True)] = 10.0
    # reward that ends the search: 1 where all tests pass; 0: none
    enough: Annotated[float, Range()] = 0.0
    cache: bool = True  # whether finished texts, rows and rewards are kept, which changes no answer

    draws = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward is None:
            raise BadConfig("pg-td: needs a reward; give one, as in reward=tests:path=tests.jsonl")

    def run(self, ctx: Context) -> Steps:
        """Raises BadConfig or Unsupported, before anything runs, for what it cannot honour."""
        refuse_for_search("pg-td", ctx)
        needs_text("pg-td", ctx, self.reward)
        return self._run_steps(ctx)

    def _run_steps(self, ctx: Context) -> Steps:
        finished_texts: dict[Text, Found] = {}
        try:
            yield from self.run_rollouts(ctx, finished_texts)
        except Spent:
            if not finished_texts:
                raise
        sorted_texts = sorted(
            finished_texts.items(), key=lambda text_found: -text_found[1].reward
        )  # the older of equal ones
        for branch in [branch for branch in ctx.branches if branch != ctx.branch]:
            yield Drop(branch)
        best_text, best_found = sorted_texts[0]
        yield Commit(list(best_text), torch.empty(0), ctx.branch, ["target"] * len(best_text))
        answers = [
            (list(text), text_found.reward, text_found.reason) for text, text_found in sorted_texts
        ]
        yield Finish(ctx.branch, best_found.reason, answers)

    def run_rollouts(self, ctx: Context, finished_texts: dict[Text, Found]) -> Steps:
        """Runs the rollouts. `finished_texts`: every finished text, in the order in which they
        were.
        """
        reply: Reply = yield Ask(TokenTree(ctx.tokens[-1]), branch=ctx.branch)
        root = Node((), make_edges(weigh_next_tokens(ctx, reply.logits[0], (), self.k)))
        written_texts: list[Written] = []
        for _ in range(self.rollouts):
            tree_path, node = descend_tree(root, self.c, self.base)
            if node is None:
                edge = tree_path[-1][1]
                edge.node = node = Node((*tree_path[-1][0].text, edge.token))
                finished_text = yield from self.finish_node(ctx, node, written_texts)
                if not (self.cache and finished_text in finished_texts):
                    reward = yield from self.reward_text(ctx, finished_text)
                    finished_texts.setdefault(
                        finished_text, Found(reward, str(ending_reason(ctx, finished_text)))
                    )
                node.full_text = finished_text
            propagate_reward(tree_path, node, finished_texts[node.full_text].reward)
            if self.enough and finished_texts[node.full_text].reward >= self.enough:
                return

    def reward_text(self, ctx: Context, text: Text) -> Generator[Message, Any, float]:
        assert self.reward is not None, "refused when it was made"
        (value,) = yield from score_outputs(ctx, self.reward, [text])
        return value

    def finish_node(
        self, ctx: Context, node: Node, written_texts: list[Written]
    ) -> Generator[Message, Any, Text]:
        """The whole text that begins with a new node's, which gets its children."""
        text = node.text
        if ending_reason(ctx, text):
            return text
        matching_texts = [
            written_text for written_text in written_texts if written_text.text[: len(text)] == text
        ]
        full_text = (
            matching_texts[0] if matching_texts else (yield from self.write_greedily(ctx, text))
        )
        if self.cache and not matching_texts:
            written_texts.append(full_text)
        node.edges = make_edges(full_text.firsts[len(text) - full_text.start])
        return full_text.text

    def write_greedily(self, ctx: Context, text: Text) -> Generator[Message, Any, Written]:
        """Goes on with a text greedily until it ends, on a branch of its own."""
        (branch,) = yield Fork(ctx.branch, 1)
        view = ctx.on(branch)
        yield Commit(list(text), torch.empty(0), branch)
        next_tokens: list[NextTokens] = []
        reason = None
        while reason is None:
            reply: Reply = yield Ask(TokenTree(view.tokens[-1]), branch=branch)
            next_tokens.append(weigh_next_tokens(view, reply.logits[0], view.output, self.k))
            commit_result: Kept = yield Commit(
                [next_tokens[-1][0][0]], reply.logits, branch, ["target"]
            )
            reason = commit_result.reason
        written_text = Written(tuple(view.output), len(text), next_tokens)
        yield Drop(branch)
        return written_text


@dataclass(frozen=True)
class Found:
    """Reward of a finished text, and why it ended."""

    reward: float
    reason: str


@dataclass(frozen=True)
class Written:
    """A finished text, and the likeliest tokens after each of its beginnings from `start` on."""

    text: Text
    start: int
    firsts: list[NextTokens]


def weigh_next_tokens(
    ctx: Context, row: torch.Tensor, text: Text | list[int], k: int
) -> NextTokens:
    """The k best tokens of the row (V,) after a text, of equal ones the lowest first."""
    logs = log_probs(ctx, row, text)
    lowest_log_prob = logs.topk(min(k, len(logs))).values[-1]
    tokens = ((logs >= lowest_log_prob) & (logs > -math.inf)).nonzero()[:, 0]
    pairs = zip(tokens.tolist(), logs[tokens].tolist(), strict=True)
    best_pairs = sorted(pairs, key=lambda pair: -pair[1])[:k]
    probability_sum = sum(math.exp(log_prob) for _, log_prob in best_pairs)
    return [(token, math.exp(log_prob) / probability_sum) for token, log_prob in best_pairs]


def ending_reason(ctx: Context, text: Text) -> str | None:
    """Why a text has ended, if it has."""
    return ctx.sampler.reason(text, ctx.limit - len(ctx.tokens))
