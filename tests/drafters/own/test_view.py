"""view: the target drafts over the rows of its own cache that a policy reads; its exactness is in
test_laws.py.
"""

from __future__ import annotations

from typing import Any

import pytest

import foretell
from foretell.cache.policy import CachePolicy
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.own.view import View
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.kv.select.quest import Quest
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws, tiny

SPECS = [
    "view:kv=(streaming-llm:sinks=1,window=3),length=2",
    "view:kv=(double-sparsity:budget=3,channels=1,bits=16,dense=0),length=2",
    "view:kv=(double-sparsity:budget=4,channels=1,bits=16,dense=0),length=2,once=yes",
]


def test_a_real_model_says_what_it_says_alone() -> None:
    lm = foretell.wrap(tiny.llama(max_position_embeddings=512), tiny.tokenizer(), None, "tiny")
    prompts = [[(5 * i * i + i) % 300 + 1 for i in range(n)] for n in (200, 31, 3, 1)]
    plain = lm.generate(prompts, "plain", max_new_tokens=40)
    whole = "view:kv=(quest:budget=512),length=3,nodes=4"
    parts = ("streaming-llm:sinks=2,window=20", "quest:budget=48,dense=0")
    for spec in [whole, *(f"view:kv=({kv}),length=3,nodes=4" for kv in parts)]:
        out = lm.generate(prompts, spec, max_new_tokens=40)
        assert [o.tokens for o in out] == [o.tokens for o in plain]
        drafted, accepted = (sum(getattr(o.stats, n) for o in out) for n in ("drafted", "accepted"))
        assert out[0].stats.calls["view"] > 5
        assert accepted == drafted if spec == whole else 0 < accepted < drafted


def test_draws_over_all_rows_are_all_accepted() -> None:
    lm = foretell.wrap(tiny.llama(), tiny.tokenizer(), None, "tiny")
    spec = "view:kv=(streaming-llm:window=512),length=4,nodes=5"
    (out,) = lm.generate([[5, 9, 2, 7] * 9], spec, max_new_tokens=41, temperature=1.0, seed=4)
    assert out.stats.accepted == out.stats.drafted >= 32


@pytest.mark.parametrize(
    ("options", "message"), [({}, r"view:kv=None: must be a cache policy, as in view:kv=quest")]
)
def test_fields_have_ranges(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        View(**options)


def test_a_spec_names_the_policy() -> None:
    _, strategy = resolve_method("view:kv=(quest:budget=64,page=8),length=3")
    assert isinstance(strategy, Speculative)
    assert strategy.drafter == View(Quest(budget=64, page=8), 3)
    assert resolve_method("view:kv=quest:budget=64,length=3")[1] == Speculative(View(Quest(64), 3))


def refusal(spec: str, target: Any, **options: Any) -> str:
    engine = Engine({"target": target})
    with pytest.raises((Unsupported, BadConfig)) as caught:
        live = engine.add(Request([1, 2, 0], resolve_method(spec)[1], Sampling(), **options))
        laws.finish(engine, live)
    return str(caught.value)


def test_what_it_cannot_run_on_is_refused_by_name() -> None:
    assert "cache rows of every layer" in refusal("view:kv=quest", ToyRecurrent(3))
    message = refusal("view:kv=quest", Toy(3), policy=CachePolicy())
    assert "cache policy" in message and "one of the two alone" in message
    for kv in ("offload", "h2o", "snapkv"):
        message = refusal(f"view:kv={kv}", Toy(3))
        assert f"view:kv='{kv}'" in message and "such as quest" in message


def test_a_budget_of_bytes_is_refused_by_name() -> None:
    engine = Engine({"target": Toy(3)})
    engine.admission.budget = 1 << 30
    with pytest.raises(Unsupported, match=r"a budget cannot run on toy\[rows by quest\]"):
        engine.add(Request([1, 2, 0], resolve_method("view:kv=quest")[1], Sampling()))
