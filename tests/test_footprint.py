"""Many requests leave nothing after in an engine; and the script that measures it on a real
model.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

import foretell
from foretell import bench
from foretell.cache.masks import ancestors
from foretell.engine import saved_stores as stores
from foretell.errors import RequestFailed
from foretell.spec import AUTO
from tests import tiny

PROMPTS = ["def add(a, b):", "The quick brown fox", "one two one two one", "x = 1\ny = 2\n"]
OWN = {
    "Live",
    "Context",
    "Cache",
    "Request",
    "Job",
    "Reply",
    "TokenTree",
    "Policy",
    "Stats",
    "Sampler",
    "State",
    "Part",
    "Rng",
    "Outcome",
    "Ask",
    "Commit",
    "Step",
    "generator",
    "Tensor",
}


def held() -> Counter[str]:
    """How many objects there are, by the names of their types; without the masks of trees, whose
    number is limited.
    """
    ancestors.cache_clear()
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects())


def serve(lm: foretell.LM, spec: str, count: int) -> None:
    """Alone, in batches, sampled, closed in the middle, and failing."""

    def broken(*_: object) -> torch.Tensor:
        raise ArithmeticError("overflow")

    for i in range(count // 8):
        prompt = PROMPTS[i % len(PROMPTS)]
        lm.generate(prompt, spec, max_new_tokens=6)
        lm.generate(PROMPTS, spec, max_new_tokens=4)
        lm.generate(prompt, spec, max_new_tokens=6, temperature=1.0, seed=i)
        stream = lm.stream(prompt, spec, max_new_tokens=20)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        with pytest.raises(RequestFailed):
            lm.generate(prompt, spec, max_new_tokens=4, logits_processors=broken)
    for *_, store in stores.iterate_stores(lm.engine):
        store.tensors()  # one may put rows by until its next draft: how many is a matter of time


@pytest.mark.parametrize("spec", ["plain", AUTO, "draft", "ngram+draft"])
def test_200_requests_leave_no_more_than_40(spec: str) -> None:
    lm = tiny.lm()
    serve(lm, spec, 40)
    before, known, bytes_ = (
        held(),
        set(lm.engine.stores),
        sum(s.nbytes for *_, s in stores.iterate_stores(lm.engine)),
    )
    serve(lm, spec, 200)
    for _ in range(100):  # the thread that computes may still be letting go of the last stream
        after = held()
        more = {name: after[name] - before[name] for name in OWN if after[name] > before[name]}
        if not more:
            break
        time.sleep(0.05)
    assert not more, "these outlive their requests"
    assert not lm.engine.live
    assert not lm.engine.events
    assert not lm.driver._calls
    assert set(lm.engine.stores) == known, "a store a request"
    assert sum(s.nbytes for *_, s in stores.iterate_stores(lm.engine)) <= max(2 * bytes_, 1 << 20)


def test_what_a_request_holds_is_seen_while_it_runs() -> None:
    """Or the test above could not fail."""
    lm = tiny.lm()
    serve(lm, AUTO, 8)
    before, last = held(), None
    while before != last:  # threads of models that earlier tests dropped may still let go
        time.sleep(0.05)
        before, last = held(), before
    stream = lm.stream(PROMPTS[1], AUTO, max_new_tokens=20)
    next(stream)
    now = held()
    for name in ("Live", "Context", "Cache", "Request", "Policy", "Part", "generator", "Tensor"):
        assert now[name] > before[name], name
    stream.close()  # type: ignore[attr-defined]
    del stream
    for *_, store in stores.iterate_stores(lm.engine):
        store.tensors()  # as in `serve`
    after = held()
    assert not {name for name in OWN if after[name] > before[name]}


def test_measuring_holds_no_requests() -> None:
    lm = tiny.lm()
    ids = lm.encode(PROMPTS[1])
    method = bench.Method(lm, AUTO)
    for _ in range(20):
        method.run([ids, ids], 4, 0.0, 0)
    assert not method.engine.live
    assert method.cache_bytes > 0
    left = Counter(type(o).__name__ for o in gc.get_objects())
    assert left["CommitMark"] == 0


# --- the script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "scripts" / "memory.py"
    spec = importlib.util.spec_from_file_location("memory_script", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_notes_memory_as_it_goes(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not tell a process its memory")
    monkeypatch.setattr(foretell, "load", lambda name, dtype: tiny.lm())
    command = (
        "memory.py --method token-recycling --requests 5 --every 2 --max-new-tokens 4 --threads 1"
    )
    monkeypatch.setattr(sys, "argv", [*command.split(), "--json", f"{tmp_path}/o.json"])
    script.main()
    out = capsys.readouterr().out
    assert "resident MB" in out
    assert "returned" in out
    found = json.loads((tmp_path / "o.json").read_text("utf-8"))
    assert [row["requests"] for row in found["rows"]] == [0, 2, 4, 5]
    assert found["live"] == 0
    assert all(row["resident"] > 1e6 and row["objects"] > 1000 for row in found["rows"])
    assert found["rows"][-1]["stores"] > 0 == found["returned"]["stores"]
    assert found["method"] == "token-recycling"


def test_resident_memory_is_that_of_the_process(script: ModuleType) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not tell a process its memory")
    before = script.resident()
    block = torch.ones(1 << 25)  # 128 MB
    assert script.resident() - before > 1 << 26
    del block
