"""LOL: the model against an amateur of falsehoods, at its last and at a lower layer.

The amateur is the model itself taught to answer falsely: a model of that name, or a folder with
LoRA weights, which then runs on the target's own weights. With o the model's law and a the
amateur's, the contrast of a layer is (1 + b) ln o - b ln a, where a layer is read with the model's
own norm and head. The row is the last layer's contrast, w times the lower layer's, and g times what
an instruction to be truthful before the prompt changes in ln o. Tokens below `least` times the
best one's chance by the last layer's o come far behind.

Paper: Chen et al., Lower Layers Matter: Alleviating Hallucination via Multi-Layer Fusion
Contrastive Decoding with Truthfulness Refocused, arXiv:2408.08769
Guarantee: lossy: the mixed law is not the model's own, on purpose; whatever drafts, the text has
exactly the mixed law
Cost: target 1, amateur 1
Needs: an amateur with the target's tokenizer; for w, layers that are run one by one here; for g, a
tokenizer or the instruction's ids
Trains: an amateur (`foretell train amateur`, or any trainer of LoRA)
Try: --model MODEL --rows lol:amateur=./FOLDER
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
from typing import TYPE_CHECKING, Any

import torch

from foretell.core.source import Nodes, Reading, Source
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
    logs,
    open_beside,
    plausible,
    possible,
    wanted,
)

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.model import Model

TRUTHFUL = "Answer truthfully and only with what is known to be a fact.\n"


@dataclass(frozen=True)
class Lol(Source):
    """With b=0, w=0, g=0 and least=0 the rows are the target's own, and nothing else is read."""

    amateur: str = "amateur"  # a model's name, or a folder of LoRA weights, written with a /
    b: float = 1.0  # how strongly the amateur is left behind
    w: float = 0.2  # weight of the lower layer
    g: float = 0.5  # weight of the instruction
    layer: int = 0  # the lower layer: what leaves the first so many; 0: half of them
    least: float = 0.1  # share of the best token's chance below which a token is left out
    icd: bool = False  # the plain difference ln o - ln a in place of the contrast
    instruction: TokenIds = ()  # before the whole prompt, as token ids; none: one of ours

    def __post_init__(self) -> None:
        for name in ("b", "w", "g"):
            if not 0 <= getattr(self, name) <= 100:
                raise BadConfig.field(f"lol:{name}", getattr(self, name), "between 0 and 100")
        if not 0 <= self.least <= 1:
            raise BadConfig.field("lol:least", self.least, "between 0 and 1")
        if not self.amateur or self.amateur == "target":
            allowed = "a model's name, or a folder of LoRA weights such as ./amateur"
            raise BadConfig.field("lol:amateur", self.amateur, allowed)
        if self.layer < 0:
            raise BadConfig.field("lol:layer", self.layer, "a number of layers from 0")

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
        brought: dict[str, Model] = {}
        if self.folder:
            target: Any = models["target"]
            make = getattr(target, "adapted", None)
            if make is None:
                need = "torch's linear layers, which LoRA weights are added to"
                raise Unsupported.missing("lol", target.name, need, "give an amateur by name")
            brought[self.amateur] = make(self.amateur)
        models = {**models, **brought}
        check_partner("lol:amateur", models, self.amateur)
        if self.w and self.amateur in models:
            amateur = models[self.amateur]
            if not {"layers", "taps"} <= amateur.caps:
                need = "layers that are run one by one"
                raise Unsupported.missing("lol:w", amateur.name, need, "give w=0")
            if len(amateur.layout) != len(models["target"].layout):
                need = "as many layers as the target"
                raise Unsupported.missing("lol:w", amateur.name, need, "give w=0")
        return brought

    def start(self, ctx: Context) -> Generator[Message, Any, Beside | None]:
        for name in self.models:
            check_room(ctx, "lol:amateur", name)
        layers = len(ctx.models["target"].layout)
        if self.layer > layers:
            raise BadConfig.field("lol:layer", self.layer, f"at most {layers} here")
        if not self.g:
            return None
        beside = yield from open_beside(ctx, "lol", self.instructed(ctx))
        return beside

    def instructed(self, ctx: Context) -> list[int]:
        """The prompt with the instruction, which stands behind what begins every prompt."""
        prompt = list(ctx.tokens[: len(ctx.tokens) - len(ctx.output)])
        if self.instruction:
            check_ids("lol:instruction", self.instruction, ctx.models["target"].vocab)
            return [*self.instruction, *prompt]
        words = words_of(ctx.models["target"], "lol:g, which gives an instruction,")
        size = len(words.start) if tuple(prompt[: len(words.start)]) == words.start else 0
        return [*prompt[:size], *words.encode(TRUTHFUL.encode()), *prompt[size:]]

    def read(
        self,
        ctx: Context,
        state: Beside | None,
        tree: TokenTree,
        taps: Sequence[int],
        nodes: Nodes = None,
    ) -> Reading:
        rows = wanted(tree, nodes)
        target = ctx.models["target"]
        layer = self.layer or len(target.layout) // 2
        lower = (layer,) if self.w else ()
        tapped = tuple(sorted({*taps, *lower}))
        asks = [Ask(tree, branch=ctx.branch, rows=rows, taps=tapped)]
        if self.contrasts:
            asks.append(Ask(tree, self.amateur, ctx.branch, rows=rows, taps=lower))
        if state is not None:
            asks.append((yield from ask_beside(ctx, state, tree, rows)))
        own, *others = yield asks
        if self.off:
            return own  # type: ignore[no-any-return]
        o = logs(own.logits)
        vocab = o.shape[-1]
        parts = [o]
        a = early_a = None
        if self.contrasts:
            amateur = others.pop(0)
            a = logs(amateur.logits.to(o), vocab)
            parts.append(a)
            if self.w:
                early_a = logs(layer_rows(ctx.models[self.amateur], amateur, layer).to(o), vocab)
        mixed = self.contrast(o, a)
        if self.w:
            early = logs(layer_rows(target, own, layer).to(o))
            mixed = mixed + self.w * self.contrast(early, early_a)
        if others:
            instructed = logs(others[0].logits.to(o))
            parts.append(instructed)
            mixed = mixed + self.g * (instructed - o)
        return replace(own, logits=plausible(possible(mixed, *parts), o, self.least))

    def contrast(self, strong: torch.Tensor, weak: torch.Tensor | None) -> torch.Tensor:
        """Of logarithms of laws (N, V)."""
        if weak is None:
            return strong
        return strong - weak if self.icd else (1 + self.b) * strong - self.b * weak
