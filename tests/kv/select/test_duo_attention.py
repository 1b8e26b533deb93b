"""duo-attention: its settings, the gates that it reads, and the bytes that it saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretell.cache.buffers import row_bytes
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadFile, Unsupported
from foretell.kv.select.duo_attention import DuoAttention
from foretell.kv.select.gates import save_gates
from foretell.kv.select.ragged import Ragged
from foretell.strategies.plain import Plain
from tests.cache.users import by_chunks
from tests.kv.policies import PROMPT, gates, run, small, target

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "duo-attention:sparsity=0.5,sinks=2,recent=6,every=3,gates={gates}"
LARGE_SPEC = "duo-attention:sparsity=0"


def test_without_streaming_heads_it_is_the_full_cache() -> None:
    (want,) = run(target(), [PROMPT], None)
    (live,) = run(target(), [PROMPT], DuoAttention(sparsity=0))
    assert live.ctx.output == want.ctx.output
    assert live.ctx.stats.calls == want.ctx.stats.calls


@pytest.mark.parametrize("every", [1, 5, 50])
def test_when_rows_leave_changes_nothing(every: int) -> None:
    (want,) = run(target(), [PROMPT], small("duo-attention"))
    kv = DuoAttention(0.5, sinks=2, recent=6, every=every, gates=gates())
    (live,) = run(target(), [PROMPT], kv)
    assert live.ctx.output == want.ctx.output


def test_half_the_heads_save_their_middle_rows() -> None:
    """Rows and bytes of a text, at every step, are those that were promised."""
    model = target()
    kv = DuoAttention(0.5, sinks=2, recent=6, every=4, gates=gates())
    engine = Engine({"target": model}, plan=by_chunks(7))
    sampling = Sampling(temperature=0.0, max_new_tokens=30)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=kv.build_policy(model)))
    of_a_row = row_bytes(model.layout, model.dtype)
    seen = 0
    while engine.live:
        engine.step()
        if ("target", 0) not in live.caches:
            continue
        cache = live.caches["target", 0]
        policy = cache.policy
        assert isinstance(policy, Ragged)
        gone = cache.length - cache.base
        assert cache.base <= 2 + 6 + 4 - 1
        assert policy.bytes == gone * of_a_row / 2
        seen = max(seen, gone)
    assert seen > 30


def test_the_promise_at_8192_tokens() -> None:
    """Of 135M-parameter SmolLM2's half of 90 heads, the rows of the defaults."""
    kv = DuoAttention()
    most = max(
        kv.sinks + kv.recent + (length - kv.sinks - kv.recent) % kv.every
        for length in range(8192, 8192 + kv.every)
    )
    assert (most + 8192) / 2 / 8192 < 0.53


def test_gates_decide_which_heads_stream(tmp_path: Path) -> None:
    model = target()
    table = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    save_gates(table, tmp_path / "gates.safetensors", model, 3)
    policy = DuoAttention(gates=str(tmp_path)).build_policy(model)
    assert policy.streaming.equal(table < 0.5)
    with pytest.raises(Unsupported, match=r"kv=duo-attention.*foretell train gates"):
        DuoAttention().build_policy(model)
    (tmp_path / "gates.safetensors").write_bytes(b"no table")
    with pytest.raises(BadFile, match="cannot be read"):
        DuoAttention(gates=str(tmp_path)).build_policy(model)
