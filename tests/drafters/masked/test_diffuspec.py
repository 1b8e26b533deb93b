"""Lengths, masks, kept rows and refusals; the search is in tests/drafters/masked/test_lattice.py,
exactness in test_laws.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.core.masked_text import Look
from foretell.core.request import Request
from foretell.core.tokenizer_bytes import Words
from foretell.core.types import Sampling
from foretell.drafters.masked.diffuspec import Diffuspec, State
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.models.diffusion.canvas import CanvasCache, Denoiser
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from foretell.testing.toy_canvas import Oracle, ToyCanvas, ToyNoise
from tests import laws, tiny

SPECS = ["diffuspec:beam=1,weight=1,refresh=0", "diffuspec:search=no,adaptive=no,k_min=2,k_max=3"]
PROMPT = [1, 2, 3, 1, 2]


def loop(proposed: list[int], agreed: list[int], rho: float, delta: int) -> list[int]:
    """Lengths of a list of drafts, by the formula of the paper's section 4.3."""
    lengths = []
    for last in range(len(proposed)):
        gen = acc = 0.0
        for place in range(last + 1):
            gen = (1 - rho) * gen + rho * proposed[place]
            acc = (1 - rho) * acc + rho * agreed[place]
        lengths.append(max(20, min(30, int(gen + delta * (acc >= gen)))))
    return lengths


def test_lengths_follow_both_averages() -> None:
    torch.manual_seed(3)
    for rho, delta in ((0.5, 10), (0.25, 4)):
        drafter = Diffuspec(decay=rho, growth=delta)
        state = State(None, [], drafter.k_max)  # type: ignore[arg-type]
        proposed = torch.randint(10, 31, (60,)).tolist()
        proposed[20:40] = [30] * 20
        agreed = [
            min(p, int(x)) for p, x in zip(proposed, torch.randint(0, 34, (60,)), strict=True)
        ]
        agreed[20:40] = [30] * 20
        lengths = []
        for pair in zip(proposed, agreed, strict=True):
            drafter.follow_averages(state, *pair)
            lengths.append(state.k)
        assert lengths == loop(proposed, agreed, rho, delta)
        assert len({*lengths}) > 3 and min(lengths) >= 20 and max(lengths) <= 30
    fixed = Diffuspec(adaptive=False)
    state = State(None, [], fixed.k_max)  # type: ignore[arg-type]
    fixed.follow_averages(state, 1, 0)
    assert state.k == 30


def looked(monkeypatch: pytest.MonkeyPatch) -> list[Look]:
    """Every forward over a canvas."""
    looks: list[Look] = []
    prepare = CanvasCache.prepare

    def noted(self: CanvasCache, ask: Any, tokens: Any, chunk: int) -> Any:
        looks.append(ask)
        return prepare(self, ask, tokens, chunk)

    monkeypatch.setattr(CanvasCache, "prepare", noted)
    return looks


def output(models: Any, method: str, prompt: Any = PROMPT, **more: Any) -> Any:
    setting = laws.Setting(Sampling(**{"max_new_tokens": 24, **more}))
    strategy = Plain() if method == "plain" else laws.build(method, nodes=40)
    return laws.generate(strategy, prompt, setting, models)


def test_as_many_masks_as_the_averages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = looked(monkeypatch)
    models = {"target": Toy(8, copy=2.0), "draft": ToyCanvas(9)}
    output(models, "diffuspec:k_min=3,k_max=7,growth=1", max_new_tokens=40)
    counts = [len(look.wanted) for look in looks]
    assert counts[0] == 7 and {*counts[:-7]} <= {3, 4, 5, 6, 7}
    assert all(
        look.canvas[-count:] == [-1] * count for look, count in zip(looks, counts, strict=True)
    )
    assert all(look.computed is None for look in looks)


@pytest.mark.parametrize("shift", [0, 1])
def test_masks_are_filled_by_a_model_that_knows_the_text(shift: int) -> None:
    """All of what a target says is drafted at once, by a denoiser whose rows speak of the next
    position too.
    """
    target = Toy(8, copy=2.0)
    text = output({"target": target}, "plain").ctx.output
    knows = Oracle({tuple(text): 1.0}, vocab=9, prompt_length=len(PROMPT), shift=shift)
    live = output({"target": target, "draft": knows}, "diffuspec:k_max=23,search=no")
    assert live.ctx.output == text and live.ctx.stats.calls["target"] == 1
    assert live.ctx.stats.accepted == 23


@pytest.mark.parametrize("shift", [0, 1])
def test_kept_rows_are_those_of_the_text(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With refresh=0 a forward computes what is new, and what a toy says of it is the same: its
    rows are functions of tokens alone.
    """
    looks = looked(monkeypatch)
    models = {"target": Toy(8, copy=2.0), "draft": ToyCanvas(9, shift=shift)}
    drafted = []
    for refresh in (1, 3, 0):
        looks.clear()
        live = output(models, f"diffuspec:refresh={refresh},k_min=3,k_max=4")
        drafted.append((live.ctx.output, live.ctx.stats.drafted, live.ctx.stats.accepted))
        whole = [look.computed is None for look in looks]
        every = refresh or len(whole)
        assert whole == [number % every == 0 for number in range(len(whole))]
        parts = [len(look.computed) for look in looks if look.computed is not None]
        assert refresh == 1 or max(parts) < len(PROMPT) + 8
    assert drafted[0] == drafted[1] == drafted[2]


def test_rows_that_were_given_up_are_computed_again() -> None:
    """A cache that had to make room says the same afterwards."""
    model = ToyCanvas(9)
    tokens = [1, 2, 3, 4]
    cache = model.cache()
    laws.check_canvas(cache, model, tokens)
    laws.check_canvas(cache, model, tokens, known=3)
    cache.forget()
    laws.check_canvas(cache, model, tokens, known=3)


def test_a_corpus_and_the_text_decide_among_the_candidates() -> None:
    """The denoiser knows nothing; what stood after the same two tokens is drafted."""
    even = ToyCanvas(7, sharpness=0.0)
    target = Toy(6)
    text = output({"target": target}, "plain", [0], max_new_tokens=12).ctx.output
    models = {"target": target, "draft": even}
    corpus = " ".join(str(token) for token in [0, *text] * 3)
    fields = "mass=1,k_min=2,k_max=4"
    live = output(models, f"diffuspec:corpus={corpus},{fields}", [0], max_new_tokens=12)
    bare = output(models, f"diffuspec:{fields}", [0], max_new_tokens=12)
    assert live.ctx.output == bare.ctx.output == text
    assert live.ctx.stats.accepted > bare.ctx.stats.accepted


# --- models that are none for it


def refused(models: dict[str, Any], spec: str = "diffuspec") -> None:
    engine = Engine(models)
    live = engine.add(Request(PROMPT, laws.build(spec), Sampling(), name=spec))
    list(engine.run())
    assert live.error is not None and "\n" not in str(live.error)
    raise live.error


def test_models_that_cannot_draft_for_it_are_refused() -> None:
    target = Toy(8)
    with pytest.raises(Unsupported, match=r"diffuspec cannot run on toy: .*fills masks.*draft="):
        refused({"target": target, "draft": Toy(8)})
    with pytest.raises(Unsupported, match="fills masks"):
        refused({"target": target, "draft": ToyNoise(8)})
    other = ToyCanvas(9)
    other.tokenizer = Words([bytes([200 - token]) for token in range(9)])
    with pytest.raises(Unsupported, match="the target's vocabulary, and it has another"):
        refused({"target": target, "draft": other})
    with pytest.raises(Unsupported, match="or diffuspec, for which it drafts"):
        refused({"target": target, "draft": ToyCanvas(9)}, "draft")


def test_a_text_beyond_the_denoisers_vocabulary_or_context_goes_on_without_drafts() -> None:
    target = Toy(8, copy=2.0)
    plain = output({"target": target}, "plain").ctx.output
    for draft in (ToyCanvas(3), ToyCanvas(9, context=len(PROMPT))):
        live = output({"target": target, "draft": draft}, "diffuspec")
        assert live.ctx.output == plain and not live.ctx.stats.drafted


@pytest.mark.parametrize(
    ("spec", "said"), [("k_min=31", r"k_min=31: must be at most k_max \(30\)")]
)
def test_bad_settings_are_told(spec: str, said: str) -> None:
    with pytest.raises(BadConfig, match=f"diffuspec:{said}"):
        laws.build(f"diffuspec:{spec}")


def test_a_transformer_drafts_and_the_text_stays() -> None:
    """A decoder's own layers, seeing both ways: its first draft from rows of all of the text."""
    lm = tiny.lm()
    target = lm.models["target"]
    draft = Denoiser(tiny.llama(vocab_size=target.vocab), "filler", mask_id=target.vocab - 1)
    prompt = lm.encode("The quick brown fox")
    outputs = []
    for method in ("plain", "diffuspec:k_min=2,k_max=5", "diffuspec:refresh=0,k_min=2,k_max=5"):
        live = output({"target": target, "draft": draft}, method, prompt)
        outputs.append(live.ctx.output)
        assert method == "plain" or live.ctx.stats.drafted
    assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0]) == 24
