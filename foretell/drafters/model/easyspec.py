"""A draft model drafts with the attention of neighbouring layers computed side by side.

A draft model is small, and one token's forward through it is a long line of small steps, of which a
machine that holds a large target can do several at a time. So while it drafts, its layers go in
groups: the attentions of a group all read what enters the group, and their results are added layer
by layer, each before its own MLP. The first layer and the last one stand alone. Drafts are a little
worse for it, and their distributions are those of this rough model. At the beginning of the next
draft all rough rows of its cache are forgotten, and what was accepted is taken in by one ordinary
forward, which also gives the distribution of the first token: errors do not add up.

Paper: Wu et al., EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU
Utilization, arXiv:2502.02493
Guarantee: exact
Cost: target 1, easyspec length
Needs: a draft model of the llama family, computed by torch where it is rough, with the target's
tokenizer
Trains: the draft model, best distilled from the target
Differs:
- on one device a group's attentions are computed one after the other: the method's time is won
where they lie on several; `comparison.overlap` says when
- with `drafts` above 1 a tree is drawn as chains merged by prefix; the paper's tree is EAGLE-2's
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.drafters.model.chains import draw_chains
from foretell.drafters.model.reader import DraftReader
from foretell.errors import Unsupported


@dataclass(frozen=True)
class Easyspec(Drafter):
    """All three are counts."""

    length: Annotated[int, Range(1, 256)] = 4  # tokens of a chain
    drafts: Annotated[int, Range(1, 64)] = 1  # independent chains
    # layers whose attentions are computed side by side; 1: the ordinary draft
    group: Annotated[int, Range(1, 64)] = 4

    models = ("draft",)
    draws = True

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("tree",) if self.drafts > 1 else ()

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        """The rough model, made of the draft model. Raises Unsupported where it cannot be."""
        draft_model = models.get("draft")
        if draft_model is None:  # which is told of where models are looked for
            return {}
        make_rough = getattr(draft_model, "layer_parallel", None)
        if make_rough is None:
            need = "layers whose attention can be computed by itself"
            raise Unsupported.missing_capability(
                "easyspec", draft_model.name, need, "use the method draft"
            )
        return {"easyspec": make_rough(self.group)}

    def start(self, ctx: Context) -> DraftReader:
        return DraftReader(ctx, "easyspec")

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        if reader.can_read(ctx.tokens):
            chain_count = min(1 if ctx.sampler.greedy else self.drafts, budget - 1)
            yield from draw_chains(ctx, reader, tree, chain_count, self.length, budget, "easyspec")
        return tree
