"""Jobs that go through the layers in parts, beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.cache.policy import CachePolicy
from foretell.core.model import Computed
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.kv.evict.fastkv import Fastkv
from foretell.models.decoder.exact import ExactDecoder
from tests.kv.policies import PROMPT, target


class Halved(CachePolicy):
    """All tokens pass all layers, in two forwards."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def runs_layers(self, job: Any) -> bool:
        return True

    def run_layers(self, job: Any, taps: Sequence[int], run: Any) -> Computed:
        self.seen.append(len(job.tokens))
        wanted = [*{*taps, 1}]
        lower = run([replace(job, layers=(0,), rows=[])], [tap for tap in wanted if tap <= 1])
        rest = replace(job, layers=(1, 2), states=lower.hidden[1])
        upper: Computed = run([rest], [tap for tap in wanted if tap > 1])
        return Computed(upper.logits, lower.hidden | upper.hidden, "halves", upper.width)


@torch.inference_mode()
def test_rows_states_and_logits_are_in_the_order_of_the_jobs() -> None:
    model = target()
    texts = [PROMPT, PROMPT[3:], PROMPT[:5], PROMPT[1:]]
    answers = []
    for halved in (False, True):
        policies = []
        jobs = []
        for place, text in enumerate(texts):
            cache = model.cache()
            if halved and place in (1, 3):
                cache.use(Halved())
                policies.append(cache.policy)
            tree = TokenTree(text[-1]).chain([4, 5])
            job, _ = cache.prepare(Ask(tree, taps=(1, 3)), text, 1000)
            job.layers = None
            jobs.append(job)
        replies = model.forward(jobs)
        answers.append([(reply.logits, reply.hidden[1], reply.hidden[3]) for reply in replies])
        kept = [policy.seen for policy in policies if isinstance(policy, Halved)]
        assert kept == ([[20], [22]] if halved else [])
    assert replies[0].computed_by == "halves+torch"
    for ours, theirs in zip(*answers, strict=True):
        assert all(
            torch.allclose(mine, other, atol=1e-5) for mine, other in zip(ours, theirs, strict=True)
        )


def test_a_model_whose_attention_no_policy_watches_says_so() -> None:
    assert target().skips and not ExactDecoder.skips
    with pytest.raises(Unsupported, match="one by one"):
        model = type("Exact", (), {"skips": ExactDecoder.skips, "__getattr__": given})()
        Fastkv().build_policy(model)


def given(self: Any, name: str) -> Any:
    """What a decoder has."""
    return getattr(target(), name)
