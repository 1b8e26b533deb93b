"""lclm as users meet it. Its rows are tested in tests/kv/encoded/test_encoders.py,
how a text is read over them in tests/kv/encoded/test_base.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from foretell import Contexts
from foretell.errors import BadConfig, Unsupported
from tests import tiny
from tests.kv.encoded.encoders import folder

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "lclm:prefix=3,sizes=5 7,folder={lclm}"
LARGE_SPEC = "lclm:prefix=3,sizes=40,folder={lclm}"

LM = tiny.lm()
DOCS = ["def add(a, b):\n    return a + b\n", "The quick brown fox jumps over the lazy dog. "]
QUESTION = "The dog"


def spec(**more: Any) -> str:
    return f"lclm:folder={folder(LM.models['target'], 'lclm', **more)}"


@pytest.mark.parametrize("method", ["suffix", "draft"])
def test_drafts_leave_the_text_as_it_is(method: str) -> None:
    prompt = Contexts(DOCS, QUESTION, "Read.")
    plain = LM.generate(prompt, "plain", max_new_tokens=24, kv=spec())
    assert LM.generate(prompt, method, max_new_tokens=24, kv=spec()).tokens == plain.tokens
    assert plain.tokens != LM.generate(prompt, "plain", max_new_tokens=24).tokens


def test_an_expanded_context_stands_before_the_question_too() -> None:
    text = LM.encode(DOCS[1], special=False)
    asked = LM.encode(QUESTION, special=False)
    expanded = LM.generate(
        Contexts(DOCS, QUESTION, expand=[2]), "plain", max_new_tokens=12, kv=spec()
    )
    by_hand = LM.generate(Contexts(DOCS, [*text, *asked]), "plain", max_new_tokens=12, kv=spec())
    assert expanded.tokens == by_hand.tokens
    assert expanded.stats.prompt_tokens == by_hand.stats.prompt_tokens
    short = LM.generate(Contexts(DOCS, QUESTION), "plain", max_new_tokens=12, kv=spec())
    assert expanded.tokens != short.tokens
    for wrong in (0, 3, "1"):
        with pytest.raises(BadConfig, match=r"expand=.*from 1 to 2"):
            LM.generate(Contexts(DOCS, QUESTION, expand=[wrong]), kv=spec())  # type: ignore[list-item]


def test_a_context_may_be_longer_than_the_encoder_has_positions() -> None:
    """Its windows have positions of their own."""
    long = DOCS[1] * 12
    assert len(LM.encode(long)) > tiny.CONTEXT
    answer = LM.generate(
        Contexts([long], QUESTION), "plain", max_new_tokens=4, kv=spec(ratio=4, window=16)
    )
    assert len(answer.tokens) == 4


def test_it_needs_a_folder() -> None:
    with pytest.raises(Unsupported, match="foretell train compressor --kind lclm"):
        LM.generate(Contexts(DOCS, QUESTION), "plain", max_new_tokens=2, kv="lclm")
