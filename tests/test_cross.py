"""Real models with different tokenizers, end to end: the demo and a draft model that has other ids
and other words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.core.request import Request
from foretell.core.tokenizer_bytes import Words
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import tiny, vocabularies
from tests.laws import Setting, build
from tests.laws import generate as run

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"


@pytest.mark.parametrize("method", ["cross-text:nodes=8", "cross-vocab:nodes=4"])
def test_the_demo_needs_fewer_steps(method: str) -> None:
    lm = vocabularies.demo()
    plain = lm.generate(PROMPT, "plain", max_new_tokens=32)
    out = lm.generate(PROMPT, method, max_new_tokens=32)
    assert out.tokens == plain.tokens and out.stats.steps < 0.8 * plain.stats.steps
    drawn = lm.generate(PROMPT, method, max_new_tokens=32, temperature=0.8)
    assert drawn.stats.accepted > 4


def test_chats_forms_and_odd_texts_are_drafted_too() -> None:
    lm = vocabularies.demo()
    for prompt in ("naïve 漢字 \U0001f642", "  two  spaces", "<|user|> x"):
        for method in ("cross-text:nodes=8", "cross-vocab:nodes=4"):
            plain = lm.generate(prompt, "plain", max_new_tokens=12)
            assert lm.generate(prompt, method, max_new_tokens=12).tokens == plain.tokens
            out = lm.generate(prompt, method, max_new_tokens=12, regex="[0-9]+ apples")
            wanted = lm.generate(prompt, "plain", max_new_tokens=12, regex="[0-9]+ apples")
            assert out.text == wanted.text


def test_drafters_for_relatives_say_which_method_translates() -> None:
    lm = vocabularies.demo()
    for method in ("draft", "rsd-s", "rsd-c", "dyspec", "retrieval-fused"):
        with pytest.raises(Unsupported, match="it has another; use cross-text or cross-vocab"):
            lm.generate(PROMPT, f"{method}:nodes=4", max_new_tokens=8)
    toys: dict[str, Any] = {"target": Toy(3), "draft": Toy(3)}
    toys["draft"].tokenizer = Words([b"x", b"y", b"z"])
    with pytest.raises(Unsupported, match="the target's tokenizer"):
        run(build("draft"), [1], Setting(Sampling()), toys)


def test_they_share_a_tree_with_other_drafters() -> None:
    lm = vocabularies.demo()
    plain = lm.generate(PROMPT, "plain", max_new_tokens=32)
    for method in ("cross-text+suffix:nodes=8", "cross-vocab+ngram:nodes=8"):
        out = lm.generate(PROMPT, method, max_new_tokens=32)
        assert out.tokens == plain.tokens and out.stats.accepted > 6


@pytest.mark.parametrize("method", ["cross-text", "cross-vocab", "omnidraft", "omni"])
def test_a_request_that_gave_its_rows_away_goes_on(method: str) -> None:
    models = vocabularies.pair("sequences", copy=2.0)
    sampling = Sampling(max_new_tokens=40)
    plain = run(Plain(), [0, 1, 2], Setting(sampling), models)
    engine = Engine(models)
    live = engine.add(Request([0, 1, 2], build(method), sampling))
    while engine.live:
        engine.step()
        assert not engine.live or engine.preempt_request(live)
    assert live.error is None and live.ctx.output == plain.ctx.output and live.ctx.stats.drafted


def test_many_texts_share_forwards_of_both_models() -> None:
    lm = vocabularies.demo()
    prompts = [PROMPT, "import os\n", "for i in range("]
    methods = ["cross-text:nodes=8", "cross-vocab:nodes=4", "omnidraft:nodes=4"]
    alone = [lm.generate(prompt, "plain", max_new_tokens=16).tokens for prompt in prompts]
    together = lm.generate(prompts, methods, max_new_tokens=16)
    assert [out.tokens for out in together] == alone


def test_a_draft_model_with_another_tokenizer_loads(tmp_path: Path) -> None:
    target = tiny.save(tiny.llama(), tmp_path / "target")
    draft = tmp_path / "draft"
    words: Any = tiny.tokenizer()
    document = json.loads(words.backend_tokenizer.to_str())
    vocab = document["model"]["vocab"]
    least = len(document["added_tokens"])
    turned = {piece: least + len(words) - 1 - token for piece, token in vocab.items() if token}
    document["model"]["vocab"] = {"<|end|>": 0, **turned}
    tiny.save(tiny.llama(), draft)
    (draft / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    lm = foretell.load(target, draft=draft, backend="torch")
    plain = lm.generate("def add", "plain", max_new_tokens=16)
    for method in ("cross-text:nodes=6", "cross-vocab:nodes=4"):
        out = lm.generate("def add", method, max_new_tokens=16)
        assert out.tokens == plain.tokens and out.stats.drafted


def test_without_the_other_tokenizer_it_is_refused() -> None:
    lm = tiny.lm()
    with pytest.raises(Unsupported, match=r"cross-text cannot run on .*it has none"):
        lm.generate("x", "cross-text:nodes=4", max_new_tokens=4)
    small = tiny.llama(vocab_size=64)
    with pytest.raises(BadConfig, match="one tokenizer"):
        foretell.wrap(tiny.llama(), tiny.tokenizer(), small)
