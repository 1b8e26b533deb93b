"""TriForce: its middle level has the law it names; its exactness is in test_laws.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import foretell
from foretell.cache.policy import CachePolicy
from foretell.core.context import Context
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.drafters.own.triforce import Triforce
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.kv.evict.streaming_llm import StreamingLlm
from foretell.speculation.strategy import Speculative
from foretell.testing.outcomes import Enumerator
from foretell.testing.toy import Toy, ToyRecurrent
from tests import laws, tiny
from tests.drafters.test_every import drafted

SPECS = [
    "triforce:fresh=yes,chunk=2,length=3",
    "triforce:view=(streaming-llm:sinks=1,window=3),length=3,ahead=2",
]
PROMPT = [1, 2, 0, 1, 2, 2, 0, 1, 0, 2, 1, 1]


def world(vocab: int = 3, **options: Any) -> dict[str, Model]:
    return laws.world(Speculative(Triforce(**options)), vocab)


@pytest.mark.parametrize(
    ("ahead", "more"), [(1, {}), (2, {}), (2, {"fresh": True}), (1, {"view": StreamingLlm(1, 4)})]
)
def test_a_draft_has_the_law_of_the_target_over_the_retrieved_rows(
    ahead: int, more: dict[str, Any]
) -> None:
    """Whatever the draft model proposes, refusals included: there the released code is biased."""
    drafter = Triforce(length=2, ahead=ahead, chunk=2, **more)
    models = world(length=2, ahead=ahead, chunk=2, **more)
    options = Sampling(temperature=1.0)
    found: Counter[tuple[int, ...]] = Counter()
    named: dict[tuple[int, ...], list[float]] = {}

    def once(door: Enumerator) -> TokenTree:
        request = Request(PROMPT, Speculative(drafter, nodes=2), options, rng=door)
        ctx = Context(Engine(models), request).scope_to(drafter)
        tree = drafted(request.strategy, ctx, drafter.start(ctx), 9)  # type: ignore[arg-type]
        for node in range(1, len(tree)):
            law = tree.laws[node]
            assert law is not None
            above = tuple(tree.tokens_to(tree.parents[node]))
            assert named.setdefault(above, law.probs.tolist()) == law.probs.tolist()
        return tree

    for weight, tree in Enumerator.walk_outcomes(once):
        found[tuple(tree.tokens[1:])] += weight  # type: ignore[assignment]
    assert len(found) == 9
    for (first, second), chance in found.items():
        want = named[()][first] * named[first,][second]
        assert chance == pytest.approx(want, abs=1e-12)
    whole = laws.expected_law(models["target"], PROMPT, (), laws.Setting(options))  # type: ignore[arg-type]
    assert max(abs(a - b) for a, b in zip(named[()], whole, strict=True)) > 0.01


def test_a_real_model_says_what_it_says_alone() -> None:
    hf = tiny.llama(max_position_embeddings=512)
    lm = foretell.wrap(hf, tiny.tokenizer(), tiny.relative(hf), "tiny")
    prompts = [[(5 * i * i + i) % 300 + 1 for i in range(n)] for n in (200, 31, 3, 1)]
    plain = lm.generate(prompts, "plain", max_new_tokens=40)
    for more, count in (("", 4), ("fresh=yes,", 1), ("view=(quest:budget=64,dense=0),", 1)):
        spec = f"triforce:{more}window=20,sinks=2,nodes=6"
        out = lm.generate(prompts[:count], spec, max_new_tokens=40)
        assert [o.tokens for o in out] == [o.tokens for o in plain[:count]]
        calls = out[0].stats.calls
        assert sum(o.stats.accepted for o in out) > 0
        assert calls["triforce"] > 5 and calls["triforce-draft"] > 5


def test_chunks_and_a_policy_are_not_both_chosen_by() -> None:
    with pytest.raises(BadConfig, match=r"triforce:fresh=yes,view=streaming-llm: .*leave"):
        Triforce(fresh=True, view=StreamingLlm())


def refusal(models: dict[str, Model], **options: Any) -> str:
    engine = Engine(models)
    with pytest.raises(Unsupported) as caught:
        live = engine.add(Request(PROMPT, Speculative(Triforce()), Sampling(), **options))
        laws.finish(engine, live)
    return str(caught.value)


def test_what_it_cannot_run_on_is_refused_by_name() -> None:
    draft = Toy(3, noise=0.5)
    message = refusal({"target": ToyRecurrent(3), "draft": draft})
    assert "triforce cannot run on" in message and "use the method draft" in message
    assert "'draft' model" in refusal({"target": Toy(3)})
    message = refusal({"target": Toy(3), "draft": draft}, policy=CachePolicy())
    assert "cache policy" in message and "one of the two alone" in message


def test_a_budget_of_bytes_is_refused_by_name() -> None:
    engine = Engine({"target": Toy(3), "draft": Toy(3, noise=0.5)})
    engine.admission.budget = 1 << 30
    with pytest.raises(Unsupported, match=r"a budget cannot run on toy\[4096 retrieved rows\]"):
        engine.add(Request(PROMPT, Speculative(Triforce()), Sampling()))
