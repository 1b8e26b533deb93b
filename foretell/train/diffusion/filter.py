"""Teaches a filter which tokens of a block are final: `foretell train filter`, for `learn2pd`.

A model fills the canvases of some prompts, one token a step. What it wrote is the final text. Then
an oracle fills them again: of every step it commits all proposals that the final text has, and
nothing else, so that it sees blocks as a filter will see them. Each step is an example: the chances
of the block's likeliest tokens, and which of them are the final ones.

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
from foretell.diffusion.block_filter import BlockFilter, save
from foretell.diffusion.loop import Denoising, Proposals, asked
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
    """Lengths are in tokens."""

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
    """One step of a block: of each position (n,) the chance of its likeliest token, whether that is
    the final one, and whether it was masked still.
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

    def looked(
        self, ctx: Context, sheet: Sheet, planner: Planner, state: Any
    ) -> Generator[Message, Any, Proposals]:
        view = planner.plan(sheet, (0, 0), range(*sheet.block(self.block)))
        reply: Reply = yield asked(ctx, sheet, view)
        return Proposals(ctx, sheet, view.wanted, reply.logits)

    def fill(self, sheet: Sheet, found: Proposals, state: Any) -> None:
        best = found.p.max(-1)
        right = [self.answer[place - sheet.first] for place in found.places]
        final = best.indices == torch.tensor(right, device=best.indices.device)
        masked = torch.tensor([sheet.canvas[place] == MASKED for place in found.places])
        self.examples.append(Example(best.values.float().cpu(), final.cpu(), masked))
        chosen = (final.cpu() & masked).nonzero()[:, 0].tolist()
        if not chosen:  # it would propose the same again: the block is given up
            chosen = masked.nonzero()[:, 0].tolist()
        for number in chosen:
            token = right[number]
            sheet.commit(found.places[number], token, float(found.p[number, token]))


def filled(
    lm: LM, prompts: Sequence[Any], methods: Sequence[Any], config: TrainFilter
) -> list[Output]:
    """An answer a prompt, each by its own method. Raises what one of them raises."""
    length = config.length
    answers = lm.generate(list(prompts), methods, max_new_tokens=length, ignore_eos=True)
    for answer in answers:
        if answer.error:
            raise answer.error
    found: list[Output] = answers
    return found


def collect(
    lm: LM, prompts: Sequence[Any], config: TrainFilter, tell: Tell | None = None
) -> list[Example]:
    """The examples of these prompts. Raises what generating raises."""
    examples: list[Example] = []
    for first in range(0, len(prompts), AT_ONCE):
        if tell is not None:
            tell("replaying", first, len(prompts))
        some = prompts[first : first + AT_ONCE]
        answers = filled(lm, some, [f"confidence:block={config.block}"] * len(some), config)
        replays = [Replay(block=config.block, answer=tuple(one.tokens)) for one in answers]
        again = filled(lm, some, replays, config)
        for replay, answer, other in zip(replays, answers, again, strict=True):
            assert other.tokens == answer.tokens, "the oracle ends in the final text"
            examples += replay.examples
    return examples


def padded(examples: Sequence[Example], block: int) -> tuple[torch.Tensor, ...]:
    """Chances, final (both float) and masked (bool), each (examples, block)."""
    parts = []
    for name in ("chances", "final", "masked"):
        rows = [F.pad(getattr(one, name).float(), (0, block - len(one.final))) for one in examples]
        parts.append(torch.stack(rows))
    return parts[0], parts[1], parts[2] > 0


def train(
    examples: Sequence[Example], config: TrainFilter, tell: Tell | None = None
) -> tuple[BlockFilter, dict[str, Any]]:
    """A filter taught by eight tenths of the examples, the best by the next tenth; what the last
    tenth says of it: area under the ROC curve of the filter and of raw chances, over masked
    positions. Raises BadConfig for too few examples.
    """
    if len(examples) < 10:
        raise BadConfig(f"{len(examples)} steps are too few to learn from; give more prompts")
    torch.manual_seed(config.seed)
    order = torch.randperm(len(examples)).tolist()
    tenth = max(1, len(examples) // 10)
    parts = [order[2 * tenth :], order[tenth : 2 * tenth], order[:tenth]]
    data = [padded([examples[i] for i in part], config.block) for part in parts]
    made = BlockFilter(config.block)
    optimizer = torch.optim.AdamW(made.parameters(), lr=config.rate)
    best, kept = float("inf"), {name: t.clone() for name, t in made.state_dict().items()}
    for epoch in range(config.epochs):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(made(data[0][0]), data[0][1])
        loss.backward()
        optimizer.step()
        if epoch % 100 == 0 or epoch + 1 == config.epochs:
            with torch.no_grad():
                held = float(F.binary_cross_entropy_with_logits(made(data[1][0]), data[1][1]))
            if held < best:
                best, kept = held, {name: t.clone() for name, t in made.state_dict().items()}
            if tell is not None:
                tell(f"training, held-back loss {held:.4f}", epoch, config.epochs)
    made.load_state_dict(kept)
    made.eval()
    chances, final, masked = data[2]
    with torch.no_grad():
        said = made(chances)
    report = {
        "examples": len(examples),
        "held_back_loss": round(best, 5),
        "auc": round(area(said[masked], final[masked]), 4),
        "auc_of_chances": round(area(chances[masked], final[masked]), 4),
    }
    return made, report


def area(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Under the ROC curve: how often a right one scores above a wrong one, ties half. 1 where there
    are not both.
    """
    positive, negative = scores[labels > 0], scores[labels == 0]
    if not len(positive) or not len(negative):
        return 1.0
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive.contiguous(), right=False)
    upto = torch.searchsorted(ordered, positive.contiguous(), right=True)
    return float((below + upto).double().mean() / 2 / len(negative))


def train_filter(
    lm: LM, prompts: Sequence[Any], out: Path, config: TrainFilter, tell: Tell | None = None
) -> dict[str, Any]:
    """Collects, trains and writes; says how good it is."""
    examples = collect(lm, prompts, config, tell)
    made, report = train(examples, config, tell)
    save(made, out, lm.models["target"])
    return report
