"""Where the target's rows come from: any source with any drafter has the source's law."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Reading
from foretell.core.request import Request
from foretell.core.source import Source
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import laws
from tests.engine.users import Contrast, Guidance, mix
from tests.guidance.driving import check_batch, check_drafts

SOURCES = [Guidance(), Contrast()]
SPECS = ["plain", "ngram", "token-recycling", "draft:length=2", "draft:drafts=2,length=2"]
EXACT = [spec for spec in laws.claiming("exact") if laws.is_first(spec)]


@pytest.mark.parametrize("setting", ["plain", "penalties", "top-p", "end"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_the_law_is_the_mixed_one(source: Source, spec: str, setting: str) -> None:
    laws.check_law(laws.build(spec), setting, drafts=spec != "plain", source=source, sharpness=2.0)


def test_a_mixed_law_is_another_law() -> None:
    """Or the laws above would hold for a source that does nothing."""
    for source in SOURCES:
        with pytest.raises(AssertionError, match="the law of the first"):
            laws.check_law(laws.build("ngram"), source=Forgetful(source))


@dataclass(frozen=True)
class Forgetful(Source):
    """A slip: it reads the target alone and says otherwise."""

    inner: Source

    @property
    def models(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.models

    def read_rows(self, ctx: Context, state: None, tree: TokenTree, taps: object) -> Reading:
        reply = yield Ask(tree, branch=ctx.branch)
        return reply

    def rows(self, models: object, prompt: object) -> laws.Rows:
        rows: laws.Rows = self.inner.rows(models, prompt)  # type: ignore[attr-defined]
        return rows


@dataclass(frozen=True)
class Lagging(Guidance):
    """A slip: the quiet branch never hears of the committed tokens."""

    def read_rows(
        self, ctx: Context, state: tuple[int, int], tree: TokenTree, taps: object
    ) -> Reading:
        quiet = tree.reroot_at(ctx.on(state[0]).tokens[-1])
        first, second = yield [Ask(tree, branch=ctx.branch), Ask(quiet, branch=state[0])]
        return replace(first, logits=mix(first.logits, second.logits, self.scale))


def test_a_branch_that_does_not_follow_the_text_is_caught() -> None:
    for spec in ("plain", "draft:length=2"):
        with pytest.raises(AssertionError, match="the law of the first"):
            laws.check_law(laws.build(spec), source=Lagging(), drafts=spec != "plain")


@pytest.mark.parametrize("spec", EXACT)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_every_exact_drafter_gives_the_tokens_of_plain_decoding_with_it(
    source: Source, spec: str
) -> None:
    drafter: Any = laws.build(spec)
    if type(drafter.drafter).target_rows is not Drafter.target_rows:
        with pytest.raises(BadConfig, match="reads the target itself"):
            check_drafts(source, spec)
        return
    if isinstance(source, Contrast) and "canvas" in getattr(drafter.drafter, "draft_needs", ()):
        with pytest.raises(Unsupported, match="writes no text from left to right"):
            check_drafts(source, spec)  # the amateur would have to be the model that fills canvases
        return
    check_drafts(source, spec)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_alone_as_in_a_batch_and_closed_at_any_step(source: Source) -> None:
    check_batch(source)


def test_guidance_counts_its_quiet_branch_in_no_statistics() -> None:
    engine = Engine({"target": Toy(8, copy=1.0)})
    live = engine.add(Request([1, 2, 3], Plain(), Sampling(max_new_tokens=9), source=Guidance()))
    events = [token for event in engine.run() for token in event.tokens]
    stats = live.ctx.stats
    assert events == live.ctx.output and len(events) == 9
    assert stats.tokens == 9 and stats.steps == 8 and stats.mat == 1.0
    assert stats.calls == {"target": 9}, "both branches share a forward"


def test_a_source_without_its_model_is_refused() -> None:
    with pytest.raises(Unsupported, match="'amateur' model"):
        Engine({"target": Toy(8)}).add(Request([1], Plain(), source=Contrast()))
