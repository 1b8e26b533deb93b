"""Rows in files: texts are those of the full cache, and no file outlives its request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretell.cache.buffers import row_bytes
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.kv.store.offload import Offload
from foretell.spec import build_cache_policy
from foretell.strategies.plain import Plain
from tests import laws
from tests.kv.policies import PROMPT, drafted, target

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "offload:block=4"
LARGE_SPEC = "offload:block=400"


def lives_of(kv: Offload | None, strategy: Any = None, tokens: int = 24) -> tuple[Engine, Any]:
    engine = Engine({"target": target()})
    sampling = Sampling(temperature=1.0, seed=4, max_new_tokens=tokens)
    policy = None if kv is None else kv.build_policy(target())
    request = Request(list(PROMPT), strategy or Plain(), sampling, policy=policy)
    return engine, engine.add(request)


def test_a_sampled_text_is_the_full_caches_with_drafts_too(tmp_path: Path) -> None:
    texts = []
    for kv, strategy in (
        (None, None),
        (Offload(str(tmp_path), 4), None),
        (Offload(str(tmp_path), 4), drafted(PROMPT, 5)),
    ):
        engine, live = lives_of(kv, strategy)
        laws.finish(engine, live)
        texts.append(live.ctx.output)
    assert texts[0] == texts[1] == texts[2]


def test_files_have_the_rows_that_memory_lacks(tmp_path: Path) -> None:
    engine, live = lives_of(Offload(str(tmp_path), 4))
    of_a_row = row_bytes(target().layout, target().cache().dtype)
    most = 0
    while engine.live:
        engine.step()
        if ("target", 0) in live.caches and len(live.ctx.output) > 1:
            cache = live.caches["target", 0]
            filed = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
            assert filed == cache.policy.held_bytes == (cache.length - cache.base) * of_a_row
            assert cache.policy.bytes == 0 and cache.base < 4
            most = max(most, filed)
    assert most >= 40 * of_a_row
    assert not [*tmp_path.iterdir()]


def test_a_request_that_is_closed_leaves_nothing(tmp_path: Path) -> None:
    engine, live = lives_of(Offload(str(tmp_path), 4))
    for _ in range(6):
        engine.step()
    assert [*tmp_path.glob("*/*")]
    engine.end(live)
    assert not [*tmp_path.iterdir()]


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="offload:block=0"):
        build_cache_policy("offload:block=0")
    (tmp_path / "file").touch()
    with pytest.raises(BadConfig, match=r"^offload:dir='.*/file': rows cannot be .*; name another"):
        build_cache_policy(f"offload:dir={tmp_path}/file").build_policy(target())
