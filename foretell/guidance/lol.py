"""LOL: the model against an amateur of falsehoods, at its last and at a lower layer.

The amateur is the model itself taught to answer falsely: a model of that name, or a folder with
LoRA weights, which then runs on the target's own weights. With o the model's distribution and a the
amateur's, the contrast of a layer is (1 + b) ln o - b ln a, where a layer is read with the model's
own norm and head. The row is the last layer's contrast, w times the lower layer's, and g times what
an instruction to be truthful before the prompt changes in ln o. Tokens below `least` times the
best one's probability by the last layer's o come far behind.

Paper: Chen et al., Lower Layers Matter: Alleviating Hallucination via Multi-Layer Fusion
Contrastive Decoding with Truthfulness Refocused, arXiv:2408.08769
Guarantee: lossy: the mixed distribution is not the model's own, on purpose; whatever drafts, the
text has exactly the mixed distribution
Cost: target 1, amateur 1
Needs: an amateur with the target's tokenizer; for w, layers that are run one by one here; for g, a
tokenizer or the instruction's ids
Trains: an amateur (`foretell train amateur`, or any trainer of LoRA)
Try: --model MODEL --guidance lol:amateur=./FOLDER
Differs:
- the paper was read in its abstract only: the sum, and b, w and g, are what it outlines, with the
lower layer at half depth; the contrast is the one of its predecessor (Zhang et al.,
arXiv:2312.15710), in the form that keeps ln o whole. `icd=yes` is that one's own, ln o - ln a
- `least` is 0.1 as for generated texts there; 0 for answers that are only scored
- the instruction is ours
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.drafter import Reading
from foretell.core.settings import Range
from foretell.core.source import Nodes, Source
from foretell.core.text import TokenIds, check_ids
from foretell.core.tokenizer_bytes import words_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Message
from foretell.errors import BadConfig, Unsupported
from foretell.guidance.mixing import (
    Beside,
    ask_beside,
    check_partner,
    check_room,
    layer_rows,
    log_probs,
    mask_implausible,
    mask_impossible,
    open_beside,
    requested_nodes,
)

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

TRUTHFUL = "Answer truthfully and only with what is known to be a fact.\n"


@dataclass(frozen=True)
class Lol(Source):
    """The settings of LOL; with b=0, w=0, g=0 and least=0 the rows are the target's own, and
    nothing else is read.
    """

    amateur: str = "amateur"  # a model's name, or a folder of LoRA weights, written with a /
    b: Annotated[float, Range(0, 100)] = 1.0  # how strongly the amateur is left behind
    w: Annotated[float, Range(0, 100)] = 0.2  # weight of the lower layer
    g: Annotated[float, Range(0, 100)] = 0.5  # weight of the instruction
    # the lower layer: what leaves the first so many; 0: half of them
    layer: Annotated[int, Range(0)] = 0
    # share of the best token's probability below which a token is left out
    least: Annotated[float, Range(0, 1)] = 0.1
    icd: bool = False  # the plain difference ln o - ln a in place of the contrast
    instruction: TokenIds = ()  # before the whole prompt, as token ids; none: one of ours

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.amateur or self.amateur == "target":
            expected = "a model's name, or a folder of LoRA weights such as ./amateur"
            raise BadConfig.field("lol:amateur", self.amateur, expected)

    @property
    def contrasts(self) -> bool:
        return bool(self.b or self.icd)

    @property
    def off(self) -> bool:
        return not (self.contrasts or self.w or self.g or self.least)

    @property
    def folder(self) -> bool:
        """Whether the amateur is a folder of LoRA weights."""
        return "/" in self.amateur

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.amateur,) if self.contrasts else ()

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("layers", "taps") if self.w else ()

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        if not self.contrasts:
            return {}
        adapted_models: dict[str, Model] = {}
        if self.folder:
            target: Any = models["target"]
            adapt_model = getattr(target, "adapted", None)
            if adapt_model is None:
                capability = "torch's linear layers, which LoRA weights are added to"
                raise Unsupported.missing_capability(
                    "lol", target.name, capability, "give an amateur by name"
                )
            adapted_models[self.amateur] = adapt_model(self.amateur)
        models = {**models, **adapted_models}
        check_partner("lol:amateur", models, self.amateur)
        if self.w and self.amateur in models:
            amateur = models[self.amateur]
            if not {"layers", "taps"} <= amateur.caps:
                capability = "layers that are run one by one"
                raise Unsupported.missing_capability("lol:w", amateur.name, capability, "give w=0")
            if len(amateur.layout) != len(models["target"].layout):
                capability = "as many layers as the target"
                raise Unsupported.missing_capability("lol:w", amateur.name, capability, "give w=0")
        return adapted_models

    def start(self, ctx: Context) -> Generator[Message, Any, Beside | None]:
        for name in self.models:
            check_room(ctx, "lol:amateur", name)
        layer_count = len(ctx.models["target"].layout)
        if self.layer > layer_count:
            raise BadConfig.field("lol:layer", self.layer, f"at most {layer_count} here")
        if not self.g:
            return None
        instructed_branch = yield from open_beside(ctx, "lol", self.instructed_prompt(ctx))
        return instructed_branch

    def instructed_prompt(self, ctx: Context) -> list[int]:
        """Returns the prompt with the instruction, which follows what begins every prompt."""
        prompt = list(ctx.tokens[: len(ctx.tokens) - len(ctx.output)])
        if self.instruction:
            check_ids("lol:instruction", self.instruction, ctx.models["target"].vocab)
            return [*self.instruction, *prompt]
        token_words = words_of(ctx.models["target"], "lol:g, which gives an instruction,")
        start_length = (
            len(token_words.start)
            if tuple(prompt[: len(token_words.start)]) == token_words.start
            else 0
        )
        return [
            *prompt[:start_length],
            *token_words.encode(TRUTHFUL.encode()),
            *prompt[start_length:],
        ]

    def read_rows(
        self,
        ctx: Context,
        state: Beside | None,
        tree: TokenTree,
        taps: Sequence[int],
        nodes: Nodes = None,
    ) -> Reading:
        requested_rows = requested_nodes(tree, nodes)
        target = ctx.models["target"]
        lower_layer = self.layer or len(target.layout) // 2
        lower_layers = (lower_layer,) if self.w else ()
        tapped_layers = tuple(sorted({*taps, *lower_layers}))
        asks = [Ask(tree, branch=ctx.branch, rows=requested_rows, taps=tapped_layers)]
        if self.contrasts:
            asks.append(Ask(tree, self.amateur, ctx.branch, rows=requested_rows, taps=lower_layers))
        if state is not None:
            asks.append((yield from ask_beside(ctx, state, tree, requested_rows)))
        target_reply, *other_replies = yield asks
        if self.off:
            return target_reply  # type: ignore[no-any-return]
        target_logs = log_probs(target_reply.logits)
        vocab = target_logs.shape[-1]
        mixed_parts = [target_logs]
        amateur_logs = amateur_early_logs = None
        if self.contrasts:
            amateur_reply = other_replies.pop(0)
            amateur_logs = log_probs(amateur_reply.logits.to(target_logs), vocab)
            mixed_parts.append(amateur_logs)
            if self.w:
                amateur_early_logs = log_probs(
                    layer_rows(ctx.models[self.amateur], amateur_reply, lower_layer).to(
                        target_logs
                    ),
                    vocab,
                )
        mixed_rows = self.contrast_rows(target_logs, amateur_logs)
        if self.w:
            early_logs = log_probs(layer_rows(target, target_reply, lower_layer).to(target_logs))
            mixed_rows = mixed_rows + self.w * self.contrast_rows(early_logs, amateur_early_logs)
        if other_replies:
            instructed_logs = log_probs(other_replies[0].logits.to(target_logs))
            mixed_parts.append(instructed_logs)
            mixed_rows = mixed_rows + self.g * (instructed_logs - target_logs)
        return replace(
            target_reply,
            logits=mask_implausible(
                mask_impossible(mixed_rows, *mixed_parts), target_logs, self.least
            ),
        )

    def contrast_rows(
        self, target_logs: torch.Tensor, amateur_logs: torch.Tensor | None
    ) -> torch.Tensor:
        """Contrasts rows with an amateur's, both logarithms of probabilities (N, V)."""
        if amateur_logs is None:
            return target_logs
        return (
            target_logs - amateur_logs
            if self.icd
            else (1 + self.b) * target_logs - self.b * amateur_logs
        )
