"""Chooses anew in each step which layer drafts for the target and how many tokens, as each did.

After every verification the target's norm and head read the hidden states of all layers at the
verified tokens: what each layer would have drafted there (its shadow tokens) beside what the target
said. So every exit l has a share alpha of accepted drafts, and the next step takes the exit and the
length d that promise the most tokens per layer read, (1 + alpha + ... + alpha^d) / (d l + L); d = 0
is a plain step. A draft ends sooner behind a token of less confidence than the midpoint between
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
- when sampling, alpha is the chance that a draft from the exit's law is accepted, the sum of
min(p, q), where the authors count equal best tokens
- of the prompt the tokens count that were computed in the forward before the first token: not those
of earlier pieces of a long prompt, nor of a shared prefix. When sampling none count: a seed's draws
follow the drafts, and must not tell how the prompt came to be computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.tree import TokenTree
from foretell.drafters.own.early_exit import exit_chain, layer_count
from foretell.errors import BadConfig

DEEPEST = 1024  # layers that a model may have


class Records:
    """What the exits of one request have come to, each step weighing less than the next.

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

    def note(
        self, agreed: np.ndarray, right: np.ndarray, confidence: np.ndarray, decay: float
    ) -> None:
        """A step's tokens, all (exits, n): chances of acceptance, whether the shadow tokens were
        right, and their confidences.
        """
        self.seeded = True
        self.trials = decay * self.trials + agreed.shape[1]
        self.agreed = decay * self.agreed + agreed.sum(1)
        for kind, which in enumerate((~right, right)):
            self.counts[kind] = decay * self.counts[kind] + which.sum(1)
            self.confidences[kind] = decay * self.confidences[kind] + (confidence * which).sum(1)

    def best(self, longest: int) -> tuple[int, int]:
        """(place of the exit, length) that promise the most tokens per layer read.

        Ties go to the lower exit, then to the shorter draft.
        """
        alpha = np.minimum(1.0, self.agreed / self.trials)
        lengths = np.arange(longest + 1)
        expected = np.cumsum(alpha[:, None] ** lengths, 1)
        promise = expected / (lengths * self.exits[:, None] + self.layers)
        place, length = np.unravel_index(int(promise.argmax()), promise.shape)
        return int(place), int(length)

    def midpoint(self, place: int) -> float | None:
        """Between the mean confidences of an exit's wrong and right shadow tokens."""
        counts = self.counts[:, place]
        if not counts.all():
            return None
        return float((self.confidences[:, place] / counts).mean())


@dataclass(frozen=True)
class DelExit(Drafter):
    """Counts, and a factor."""

    longest: int = 17  # tokens of a draft at most
    decay: float = 0.95  # weight of a step, to that of the next
    prompt: int = 32  # last tokens of the prompt that count, at temperature 0
    stride: int = 1  # every so many layers is an exit

    needs = ("layers",)
    draws = True
    taps = tuple(range(1, DEEPEST + 1))

    def __post_init__(self) -> None:
        for name, low, high in (("longest", 1, 256), ("prompt", 0, 512), ("stride", 1, DEEPEST)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadConfig.field(f"del-exit:{name}", value, f"between {low} and {high}")
        if not 0 < self.decay <= 1:
            raise BadConfig.field("del-exit:decay", self.decay, "above 0 and at most 1")

    def start(self, ctx: Context) -> Records:
        """Raises BadConfig where the target has no such exit."""
        count = layer_count(ctx, "del-exit")
        if self.stride >= count:
            raise BadConfig.field("del-exit:stride", self.stride, f"below {count} for this model")
        return Records(range(self.stride, count, self.stride), count)

    def steps(self, ctx: Context, records: Records, budget: int) -> Drafting:
        place, length = records.best(self.longest) if records.seeded else (0, 1)
        threshold = records.midpoint(place)
        length = min(length, budget - 1, ctx.depth)

        def unsure(chance: float) -> bool:
            return threshold is not None and chance < threshold

        exit_layer = int(records.exits[place])
        tree: TokenTree = yield from exit_chain(
            ctx, exit_layer, length, "del-exit", self.taps, unsure
        )
        return tree

    def observe(self, ctx: Context, records: Records, step: Feedback) -> None:
        """Notes the tokens up to the first wrong draft, that one included: behind it the text is
        another.
        """
        said = [step.tree.tokens[node] for node in step.outcome.path]
        if step.outcome.token is not None:
            said.append(step.outcome.token)
        nodes = [0, *step.outcome.path][: len(said)]
        before = ctx.output[: len(ctx.output) - len(step.tokens)]
        texts: list[list[int] | None] = [[*before, *said[:end]] for end in range(len(said))]
        last = [step.reply.logits[node] for node in nodes]
        new = step.reply.new
        if not records.seeded and self.prompt and ctx.sampler.greedy:
            prompt = [node for node in new if node < 0][-self.prompt :]
            # The root is the prompt's last token.
            prompt = prompt[max(0, len(prompt) - self.prompt + 1) :]
            states = step.reply.hidden[records.layers][[new.index(node) for node in prompt]]
            rows = self._rows(ctx, states)
            last = [*rows, *last]
            said = [*rows.argmax(-1).tolist(), *said]
            texts = [*[None] * len(prompt), *texts]
            nodes = [*prompt, *nodes]
        places = [new.index(node) for node in nodes]
        hidden = torch.cat([step.reply.hidden[int(exit)][places] for exit in records.exits])
        shadow = self._rows(ctx, hidden).view(len(records.exits), len(nodes), -1)
        records.note(*self._compared(ctx, shadow, torch.stack(last), said, texts), self.decay)

    @staticmethod
    def _rows(ctx: Context, states: torch.Tensor) -> torch.Tensor:
        """(n, V) of states (n, E), in float32 or wider."""
        rows = ctx.models["target"].read(states)
        return rows if rows.dtype == torch.float64 else rows.float()

    @staticmethod
    def _compared(
        ctx: Context,
        shadow: torch.Tensor,
        last: torch.Tensor,
        said: Sequence[int],
        texts: Sequence[Sequence[int] | None],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What Records.note takes, of the exits' rows (exits, n, V) and the target's `last` (n, V).

        `said`: the target's tokens; `texts`: the output before each, None inside the prompt, where
        options that look at the output have no say.
        """
        sampler = ctx.sampler
        if not sampler.plain:
            columns = []
            for place, text in enumerate(texts):
                rows = [*shadow[:, place], last[place]]
                if text is not None:
                    rows = [sampler.scores(row, text) for row in rows]
                columns.append(torch.stack(rows))
            joint = torch.stack(columns, 1)
            shadow, last = joint[:-1], joint[-1]
        tokens = shadow.argmax(-1)
        right = tokens == torch.tensor(said, device=tokens.device)
        if sampler.greedy:
            q = shadow.softmax(-1)
            agreed = right.double()
        else:
            q = sampler.laws(shadow.flatten(0, 1)).view_as(shadow)
            agreed = torch.minimum(q, sampler.laws(last)).sum(-1)
        confidence = q.gather(-1, tokens[..., None])[..., 0]
        return agreed.cpu().numpy(), right.cpu().numpy(), confidence.cpu().numpy()
