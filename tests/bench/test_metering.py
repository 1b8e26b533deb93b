"""What is computed for a request is counted, whatever the method."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.bench.metering import Meter
from tests import tiny

PROMPT = list(range(10, 22))


def _tokens(method: str, draft: bool = False, most: int = 6, **options: Any) -> tuple[int, Any]:
    lm = tiny.lm(draft=draft)
    with Meter(lm.models["target"], len(PROMPT)) as meter:
        out = lm.generate(PROMPT, method, max_new_tokens=most, ignore_eos=True, **options)
    assert "forward" not in vars(lm.models["target"])
    return meter.tokens, out


def test_a_plain_answer_computes_all_but_its_last_token() -> None:
    tokens, out = _tokens("plain")
    assert tokens == len(out.tokens) - 1 == 5 and out.stats.calls["target"] == 6


def test_every_branch_counts() -> None:
    tokens, out = _tokens("first-finish:n=3", temperature=1.0, seed=3)
    # Each of the two copies computes the prompt's last token again.
    assert tokens == 3 * 5 + 2 and out.stats.calls["target"] <= 7


def test_rejected_drafts_count() -> None:
    plain, _ = _tokens("plain", most=30)
    tokens, out = _tokens("draft:nodes=3", draft=True, most=30)
    rejected = out.stats.drafted - out.stats.accepted
    assert rejected > 0 and tokens >= plain + rejected


def test_another_prompt_counts_beyond_the_first_one() -> None:
    lm = tiny.lm(draft=False)
    with Meter(lm.models["target"], len(PROMPT)) as meter:
        lm.generate(PROMPT, "plain", max_new_tokens=1)
        assert meter.tokens == 0
        lm.generate(PROMPT, "plain", max_new_tokens=1)
        assert meter.tokens == len(PROMPT)


def test_it_ends_where_an_error_is_raised() -> None:
    lm = tiny.lm(draft=False)
    with pytest.raises(ZeroDivisionError), Meter(lm.models["target"], 1):
        raise ZeroDivisionError
    assert "forward" not in vars(lm.models["target"])
