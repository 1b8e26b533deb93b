"""Teaches a filter which tokens of a block are final: `foretell train filter`, for `learn2pd`.

A model fills the canvases of some prompts, one token a step. What it wrote is the final text. Then
an oracle fills them again: of every step it commits all proposals that the final text has, and
nothing else, so that it sees blocks as a filter will see them. Each step is an example: the
probabilities of the block's likeliest tokens, and which of them are the final ones.

Source: Bao et al., arXiv:2509.25188, section 3, and the published training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from foretell.core.masked_text import MASKED, Sheet
from foretell.core.types import Message, Reply
from foretell.diffusion.block_filter import BlockFilter, save_filter
from foretell.diffusion.loop import Denoising, Proposals, build_look
from foretell.diffusion.planner import Planner
from foretell.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Generator

    from foretell.api.lm import LM
    from foretell.api.outputs import Output
    from foretell.core.context import Context

AT_ONCE = 16  # canvases that are filled beside each other
Tell = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class TrainFilter:
    """Settings of the run. Lengths are in tokens."""

    block: int = 32  # positions of a block
    length: int = 256  # tokens of every canvas
    epochs: int = 40_000  # passes over all examples at once
    rate: float = 3e-3  # learning rate (AdamW)
    seed: int = 0  # of the split and of the first weights

    def __post_init__(self) -> None:
        for name in ("block", "length", "epochs"):
            if getattr(self, name) < 1:
                raise BadConfig.field(name, getattr(self, name), "at least 1")


@dataclass
class Example:
    """Step of a block: of each position (n,) the probability of its likeliest token, whether that
    is the final one, and whether it was masked still.
    """

    chances: torch.Tensor
    final: torch.Tensor
    masked: torch.Tensor


@dataclass(frozen=True)
class Replay(Denoising):
    """Fills a canvas again, whose `answer` is known; notes an Example of every step."""

    block: int = 32
    answer: tuple[int, ...] = ()
    examples: list[Example] = field(default_factory=list, compare=False)

    def propose_tokens(
        self, ctx: Context, sheet: Sheet, planner: Planner, state: Any
    ) -> Generator[Message, Any, Proposals]:
        view = planner.plan_view(sheet, (0, 0), range(*sheet.block(self.block)))
        reply: Reply = yield build_look(ctx, sheet, view)
        return Proposals(ctx, sheet, view.requested, reply.logits)

    def fill_positions(self, sheet: Sheet, proposals: Proposals, state: Any) -> None:
        likeliest = proposals.p.max(-1)
        right_tokens = [self.answer[place - sheet.first] for place in proposals.places]
        final = likeliest.indices == torch.tensor(right_tokens, device=likeliest.indices.device)
        masked = torch.tensor([sheet.canvas[place] == MASKED for place in proposals.places])
        self.examples.append(Example(likeliest.values.float().cpu(), final.cpu(), masked))
        committed = (final.cpu() & masked).nonzero()[:, 0].tolist()
        if not committed:  # it would propose the same again: the block is given up
            committed = masked.nonzero()[:, 0].tolist()
        for number in committed:
            token = right_tokens[number]
            sheet.commit(proposals.places[number], token, float(proposals.p[number, token]))


def fill_canvases(
    lm: LM, prompts: Sequence[Any], methods: Sequence[Any], config: TrainFilter
) -> list[Output]:
    """An answer a prompt, each by its own method. Raises what one of them raises."""
    length = config.length
    answers = lm.generate(list(prompts), methods, max_new_tokens=length, ignore_eos=True)
    for answer in answers:
        if answer.error:
            raise answer.error
    outputs: list[Output] = answers
    return outputs


def collect_steps(
    lm: LM, prompts: Sequence[Any], config: TrainFilter, tell: Tell | None = None
) -> list[Example]:
    """The examples of these prompts. Raises what generating raises."""
    examples: list[Example] = []
    for first_prompt in range(0, len(prompts), AT_ONCE):
        if tell is not None:
            tell("replaying", first_prompt, len(prompts))
        prompt_part = prompts[first_prompt : first_prompt + AT_ONCE]
        answers = fill_canvases(
            lm, prompt_part, [f"confidence:block={config.block}"] * len(prompt_part), config
        )
        replays = [
            Replay(block=config.block, answer=tuple(first_answer.tokens))
            for first_answer in answers
        ]
        replayed_answers = fill_canvases(lm, prompt_part, replays, config)
        for replay, answer, replayed in zip(replays, answers, replayed_answers, strict=True):
            assert replayed.tokens == answer.tokens, "the oracle ends in the final text"
            examples += replay.examples
    return examples


def pad_examples(examples: Sequence[Example], block: int) -> tuple[torch.Tensor, ...]:
    """Probabilities, final (both float) and masked (bool), each (examples, block)."""
    parts = []
    for name in ("chances", "final", "masked"):
        rows = [
            F.pad(getattr(example, name).float(), (0, block - len(example.final)))
            for example in examples
        ]
        parts.append(torch.stack(rows))
    return parts[0], parts[1], parts[2] > 0


def fit_filter(
    examples: Sequence[Example], config: TrainFilter, tell: Tell | None = None
) -> tuple[BlockFilter, dict[str, Any]]:
    """A filter taught by eight tenths of the examples, the best by the next tenth; what the last
    tenth says of it: area under the ROC curve of the filter and of raw probabilities, over masked
    positions. Raises BadConfig for too few examples.
    """
    if len(examples) < 10:
        raise BadConfig(f"{len(examples)} steps are too few to learn from; give more prompts")
    torch.manual_seed(config.seed)
    step_order = torch.randperm(len(examples)).tolist()
    tenth = max(1, len(examples) // 10)
    step_parts = [step_order[2 * tenth :], step_order[tenth : 2 * tenth], step_order[:tenth]]
    padded_parts = [pad_examples([examples[i] for i in part], config.block) for part in step_parts]
    block_filter = BlockFilter(config.block)
    optimizer = torch.optim.AdamW(block_filter.parameters(), lr=config.rate)
    best_loss, best_weights = (
        float("inf"),
        {name: t.clone() for name, t in block_filter.state_dict().items()},
    )
    for epoch in range(config.epochs):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(
            block_filter(padded_parts[0][0]), padded_parts[0][1]
        )
        loss.backward()
        optimizer.step()
        if epoch % 100 == 0 or epoch + 1 == config.epochs:
            with torch.no_grad():
                held_back_loss = float(
                    F.binary_cross_entropy_with_logits(
                        block_filter(padded_parts[1][0]), padded_parts[1][1]
                    )
                )
            if held_back_loss < best_loss:
                best_loss, best_weights = (
                    held_back_loss,
                    {name: t.clone() for name, t in block_filter.state_dict().items()},
                )
            if tell is not None:
                tell(f"training, held-back loss {held_back_loss:.4f}", epoch, config.epochs)
    block_filter.load_state_dict(best_weights)
    block_filter.eval()
    chances, final, masked = padded_parts[2]
    with torch.no_grad():
        scores = block_filter(chances)
    report = {
        "examples": len(examples),
        "held_back_loss": round(best_loss, 5),
        "auc": round(roc_area(scores[masked], final[masked]), 4),
        "auc_of_chances": round(roc_area(chances[masked], final[masked]), 4),
    }
    return block_filter, report


def roc_area(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve: how often a right one scores above a wrong one, ties half. 1 where
    there are not both.
    """
    positive, negative = scores[labels > 0], scores[labels == 0]
    if not len(positive) or not len(negative):
        return 1.0
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive.contiguous(), right=False)
    not_above = torch.searchsorted(ordered, positive.contiguous(), right=True)
    return float((below + not_above).double().mean() / 2 / len(negative))


def train_filter(
    lm: LM, prompts: Sequence[Any], out: Path, config: TrainFilter, tell: Tell | None = None
) -> dict[str, Any]:
    """Collects, trains and writes; says how good it is."""
    examples = collect_steps(lm, prompts, config, tell)
    block_filter, report = fit_filter(examples, config, tell)
    save_filter(block_filter, out, lm.models["target"])
    return report
