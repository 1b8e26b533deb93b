"""Chooses anew in each step which layer drafts for the target and how many tokens, as each did.

After every verification the target's norm and head read the hidden states of all layers at the
verified tokens: what each layer would have drafted there (its shadow tokens) beside what the target
said. So every exit l has a share alpha of accepted drafts, and the next step takes the exit and the
length d that promise the most tokens per layer read, (1 + alpha + ... + alpha^d) / (d l + L); d = 0
is a plain step. A draft ends sooner after a token of less confidence than the midpoint between
what the exit's right and wrong shadow tokens had on the mean. Older steps count 0.95 of the next
newer one. The first step drafts one token from the first exit, and the end of the prompt is read as
well. Drafting and verification share rows and states as in `layerskip`, and the target should be
trained as for that.

Paper: Zarch, Gao, Jiang, Annavaram, DEL: Context-Aware Dynamic Exit Layer for Efficient
Self-Speculative Decoding, arXiv:2504.05598
Guarantee: exact
Cost: target 1, layers longest+1 at most
Needs: a model whose layers can be run one by one
Trains: nothing; the target, for speed
Differs:
- the chosen length is a cap and the midpoint ends drafts below it, and a plain step is one; the
authors' code drafts up to 17 tokens whatever was chosen, and never runs a plain step
- no draft is longer than the request's budget, and an exit without right or without wrong shadow
tokens has no midpoint, so that nothing ends its drafts sooner
- when sampling, alpha is the probability that a draft from the exit's distribution is accepted, the
sum of min(p, q), where the authors count equal best tokens
- of the prompt the tokens count that were computed in the forward before the first token: not those
of earlier pieces of a long prompt, nor of a shared prefix. When sampling none count: a seed's draws
follow the drafts, and must not tell how the prompt came to be computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.own.early_exit import exit_chain, layer_count
from foretell.errors import BadConfig

DEEPEST = 1024  # layers that a model may have


class Records:
    """Counts of what the exits of one request have come to, each step weighing less than the next.

    `exits`: the layers, ascending; arrays have an entry for each.
    """

    def __init__(self, exits: Sequence[int], layers: int):
        self.exits = np.array(exits)
        self.layers = layers
        self.seeded = False  # whether anything was noted
        self.trials = 0.0
        self.agreed = np.zeros(len(exits))  # of the trials, by chances
        self.counts = np.zeros((2, len(exits)))  # of wrong and right shadow tokens
        self.confidences = np.zeros((2, len(exits)))  # sums of theirs

    def note_step(
        self, agreed: np.ndarray, was_right: np.ndarray, confidence: np.ndarray, decay: float
    ) -> None:
        """A step's tokens, all (exits, n): probabilities of acceptance, whether the shadow tokens
        were right, and their confidences.
        """
        self.seeded = True
        self.trials = decay * self.trials + agreed.shape[1]
        self.agreed = decay * self.agreed + agreed.sum(1)
        for right_index, is_kind in enumerate((~was_right, was_right)):
            self.counts[right_index] = decay * self.counts[right_index] + is_kind.sum(1)
            self.confidences[right_index] = decay * self.confidences[right_index] + (
                confidence * is_kind
            ).sum(1)

    def best_draft(self, longest: int) -> tuple[int, int]:
        """(place of the exit, length) that promise the most tokens per layer read.

        Ties go to the lower exit, then to the shorter draft.
        """
        alpha = np.minimum(1.0, self.agreed / self.trials)
        lengths = np.arange(longest + 1)
        expected_tokens = np.cumsum(alpha[:, None] ** lengths, 1)
        token_rate = expected_tokens / (lengths * self.exits[:, None] + self.layers)
        exit_index, length = np.unravel_index(int(token_rate.argmax()), token_rate.shape)
        return int(exit_index), int(length)

    def mean_exit(self, exit_index: int) -> float | None:
        """Between the mean confidences of an exit's wrong and right shadow tokens."""
        token_counts = self.counts[:, exit_index]
        if not token_counts.all():
            return None
        return float((self.confidences[:, exit_index] / token_counts).mean())


@dataclass(frozen=True)
class DelExit(Drafter):
    """Counts, and a factor."""

    longest: Annotated[int, Range(1, 256)] = 17  # tokens of a draft at most
    # weight of a step, to that of the next
    decay: Annotated[float, Range(0, 1, open_low=True)] = 0.95
    # last tokens of the prompt that count, at temperature 0
    prompt: Annotated[int, Range(0, 512)] = 32
    stride: Annotated[int, Range(1, 1024)] = 1  # every so many layers is an exit

    needs = ("layers",)
    draws = True
    taps = tuple(range(1, DEEPEST + 1))

    def start(self, ctx: Context) -> Records:
        """Raises BadConfig where the target has no such exit."""
        target_layers = layer_count(ctx, "del-exit")
        if self.stride >= target_layers:
            raise BadConfig.field(
                "del-exit:stride", self.stride, f"below {target_layers} for this model"
            )
        return Records(range(self.stride, target_layers, self.stride), target_layers)

    def steps(self, ctx: Context, records: Records, budget: int) -> Drafting:
        exit_index, length = records.best_draft(self.longest) if records.seeded else (0, 1)
        threshold = records.mean_exit(exit_index)
        length = min(length, budget - 1, ctx.depth)

        def is_unsure(probability: float) -> bool:
            return threshold is not None and probability < threshold

        exit_layer = int(records.exits[exit_index])
        tree: TokenTree = yield from exit_chain(
            ctx, exit_layer, length, "del-exit", self.taps, is_unsure
        )
        return tree

    def observe(self, ctx: Context, records: Records, step: Feedback) -> None:
        """Notes the tokens up to the first wrong draft, that one included: after it the text is
        another.
        """
        target_tokens = [step.tree.tokens[node] for node in step.outcome.path]
        if step.outcome.token is not None:
            target_tokens.append(step.outcome.token)
        nodes = [0, *step.outcome.path][: len(target_tokens)]
        prefix = ctx.output[: len(ctx.output) - len(step.tokens)]
        prefixes: list[list[int] | None] = [
            [*prefix, *target_tokens[:text_end]] for text_end in range(len(target_tokens))
        ]
        target_rows = [step.reply.logits[node] for node in nodes]
        new_nodes = step.reply.new
        if not records.seeded and self.prompt and ctx.sampler.greedy:
            prompt_nodes = [node for node in new_nodes if node < 0][-self.prompt :]
            # The root is the prompt's last token.
            prompt_nodes = prompt_nodes[max(0, len(prompt_nodes) - self.prompt + 1) :]
            prompt_states = step.reply.hidden[records.layers][
                [new_nodes.index(node) for node in prompt_nodes]
            ]
            prompt_rows = self._logit_rows(ctx, prompt_states)
            target_rows = [*prompt_rows, *target_rows]
            target_tokens = [*prompt_rows.argmax(-1).tolist(), *target_tokens]
            prefixes = [*[None] * len(prompt_nodes), *prefixes]
            nodes = [*prompt_nodes, *nodes]
        row_positions = [new_nodes.index(node) for node in nodes]
        exit_states = torch.cat(
            [step.reply.hidden[int(exit)][row_positions] for exit in records.exits]
        )
        exit_rows = self._logit_rows(ctx, exit_states).view(len(records.exits), len(nodes), -1)
        records.note_step(
            *self._compare_rows(ctx, exit_rows, torch.stack(target_rows), target_tokens, prefixes),
            self.decay,
        )

    @staticmethod
    def _logit_rows(ctx: Context, states: torch.Tensor) -> torch.Tensor:
        """(n, V) of states (n, E), in float32 or wider."""
        rows = ctx.models["target"].head_rows(states)
        return rows if rows.dtype == torch.float64 else rows.float()

    @staticmethod
    def _compare_rows(
        ctx: Context,
        exit_rows: torch.Tensor,
        target_rows: torch.Tensor,
        target_tokens: Sequence[int],
        prefixes: Sequence[Sequence[int] | None],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Arguments for Records.note_step, of the exits' rows (exits, n, V) and the target's (n,
        V).

        `target_tokens`: the target's tokens; `prefixes`: the output before each, None inside the
        prompt, where options that look at the output have no say.
        """
        sampler = ctx.sampler
        if not sampler.plain:
            row_columns = []
            for position, prefix in enumerate(prefixes):
                rows = [*exit_rows[:, position], target_rows[position]]
                if prefix is not None:
                    rows = [sampler.scores(row, prefix) for row in rows]
                row_columns.append(torch.stack(rows))
            joint_rows = torch.stack(row_columns, 1)
            exit_rows, target_rows = joint_rows[:-1], joint_rows[-1]
        tokens = exit_rows.argmax(-1)
        is_right = tokens == torch.tensor(target_tokens, device=tokens.device)
        if sampler.greedy:
            q = exit_rows.softmax(-1)
            acceptance = is_right.double()
        else:
            q = sampler.laws(exit_rows.flatten(0, 1)).view_as(exit_rows)
            acceptance = torch.minimum(q, sampler.laws(target_rows)).sum(-1)
        confidence = q.gather(-1, tokens[..., None])[..., 0]
        return acceptance.cpu().numpy(), is_right.cpu().numpy(), confidence.cpu().numpy()
