"""Whole benches of tiny models: failing cells, resuming, peers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell.bench import runner
from foretell.bench.contenders import Method
from foretell.bench.document import begin_document, write_document
from foretell.bench.peers import Run
from foretell.bench.runner import run_bench
from foretell.bench.sets import LONG
from foretell.bench.settings import Settings
from foretell.errors import BadModel, Unsupported
from tests import tiny
from tests.bench.fakes import PROMPTS, SMALL, load


def test_a_batch_runs_together_and_a_small_set_begins_again() -> None:
    settings = Settings(methods=("plain",), max_new_tokens=4, rounds=1, requests=(3,))
    document = begin_document(settings, {"mine": PROMPTS})
    run_bench(settings, {"mine": PROMPTS}, load, document)
    (cell,) = document["cells"]
    assert cell["requests"] == 3
    assert cell["prompts"] == 2
    assert cell["tokens"] == 12
    assert cell["tokens_per_s"]
    assert cell["bytes_per_token"] is None, "a shared forward would be counted three times"
    lm = tiny.lm()
    ids = [lm.encode(p) for p in PROMPTS]
    runs = Method(lm, "plain").run([*ids, ids[0]], 4, 1.0, 7)
    assert [r.tokens for r in runs] == [
        tiny.lm().generate(i, "plain", max_new_tokens=4, temperature=1.0, seed=7 + k).tokens
        for k, i in enumerate([*ids, ids[0]])
    ]


def test_contexts_are_cells_of_their_own() -> None:
    sets = {"mixed": PROMPTS * 6}
    settings = Settings(
        methods=("plain", "ngram:n=2,nodes=3"), max_new_tokens=4, rounds=1, contexts=(10, 40, 4000)
    )
    told: list[tuple[int, int]] = []
    document = run_bench(
        settings,
        sets,
        load,
        begin_document(settings, sets),
        lambda w, *n: told.append((n[0], n[1])),
    )
    found = [(c["set"], c["context"], c["contender"], c["status"]) for c in document["cells"]]
    names = ["plain", "ngram:n=2,nodes=3"]
    assert found == [
        ("mixed", c, n, "failed" if c == 4000 else "ok")
        for c in (None, 10, 40, 4000)
        for n in names
    ]
    assert document["cells"][0]["prompts"] == 12
    assert document["cells"][2]["prompts"] == LONG
    assert "4000" in document["cells"][-1]["reason"]
    assert told[-1][0] == told[-1][1] == 2 * 2 * (12 + 3 * LONG)


def test_memory_is_noted_beside_what_should_be_enough() -> None:
    sets = {"a": PROMPTS}
    settings = Settings(methods=("plain",), max_new_tokens=4, rounds=1, requests=(1, 2))
    document = run_bench(settings, sets, load, begin_document(settings, sets))
    limit, one = document["memory_limit"], document["cells"][0]["cache_bytes"]
    both = sum(4 * sum(p.numel() for p in m.hf.parameters()) for m in tiny.lm().models.values())  # type: ignore[attr-defined]
    assert limit == {
        "weights": both,
        "caches": 2 * one,
        "bytes": int(1.15 * both) + 2 * one + 300_000_000,
    }
    assert document["peak_memory"] > 1e6


def test_what_failed_is_tried_again(tmp_path: Path) -> None:
    sets = {"a": PROMPTS[:1], "b": PROMPTS[1:]}
    path = tmp_path / "out.json"
    settings = dataclasses.replace(SMALL, methods=("draft:nodes=3",))
    without = run_bench(
        settings, sets, lambda m, d: tiny.lm(draft=False), begin_document(settings, sets, path)
    )
    assert [c["status"] for c in without["cells"]] == ["ok", "failed"] * 2
    without["cells"][3] = without["cells"][3] | {
        "status": "ok"
    }  # only the first set has a failure left
    write_document(without, path)
    whole = run_bench(settings, sets, load, begin_document(settings, sets, path))
    assert [(c["set"], c["contender"], c["status"]) for c in whole["cells"]] == [
        ("a", "plain", "ok"),
        ("a", "draft:nodes=3", "ok"),
        ("b", "plain", "ok"),
        ("b", "draft:nodes=3", "ok"),
    ]
    assert whole["cells"][2:] == json.loads(json.dumps(without["cells"]))[2:], (
        "what was there is kept"
    )
    assert whole["cells"][0] != without["cells"][0], "a group is of one run"


def test_a_document_is_whole_and_json() -> None:
    sets = {"a": PROMPTS, "b": PROMPTS[:1]}
    settings = Settings(
        models=("tiny",),
        dtypes=("float32",),
        methods=("ngram:n=2,nodes=3", "draft"),
        max_new_tokens=6,
        rounds=1,
        temperatures=(0.0, 0.8),
    )
    told: list[tuple[int, int]] = []
    document = run_bench(
        settings,
        sets,
        load,
        begin_document(settings, sets),
        lambda what, done, total: told.append((done, total)),
    )
    document = json.loads(json.dumps(document))
    assert document["schema"] == "foretell.measure.bench/1"
    assert document["bandwidth"]["bytes_per_s"] == 1e9
    keys = [(c["set"], c["temperature"], c["contender"]) for c in document["cells"]]
    assert keys == [
        (s, t, c) for s in "ab" for t in (0.0, 0.8) for c in ("plain", "ngram:n=2,nodes=3", "draft")
    ]
    assert all(c["status"] == "ok" for c in document["cells"])
    assert document["machine"]["threads"] == torch.get_num_threads()
    assert document["peak_memory"] > 1e6
    assert document["models"][0]["seconds"]["64"]["1"] > 0
    assert document["models"][0]["draft_weight_bytes"] > 0
    assert [d for d, _ in told] == sorted(d for d, _ in told)
    assert told[-1][0] == told[-1][1] == 3 * 2 * 2 * 3


def test_what_cannot_run_is_reported_and_the_rest_goes_on() -> None:
    sets = {"a": PROMPTS[:1]}
    settings = Settings(methods=("draft", "ngram:zzz=1", "ngram"), max_new_tokens=4, rounds=1)
    document = run_bench(
        settings, sets, lambda m, d: tiny.lm(draft=False), begin_document(settings, sets)
    )
    status = {c["contender"]: (c["status"], c.get("reason", "")) for c in document["cells"]}
    assert status["plain"][0] == status["ngram"][0] == "ok"
    assert status["draft"][0] == "failed"
    assert "'draft' model" in status["draft"][1]
    assert status["ngram:zzz=1"][0] == "failed"
    assert "zzz" in status["ngram:zzz=1"][1]
    sets = {"long": ["x" * 5000], "chat": [[{"role": "user", "content": "hi"}]]}
    settings = Settings(methods=("plain",), max_new_tokens=4, rounds=1)
    document = run_bench(settings, sets, load, begin_document(settings, sets))
    assert "shorten" in document["cells"][0]["reason"]
    assert document["cells"][1]["status"] == "ok", "without a chat template it is given as text"


def test_one_of_several_models_may_be_missing() -> None:
    def some(model: str, dtype: str) -> foretell.LM:
        if model == "gone":
            raise BadModel("gone: no such folder; give another")
        return tiny.lm()

    sets = {"a": PROMPTS[:1]}
    settings = Settings(models=("gone", "tiny"), methods=("plain",), max_new_tokens=4, rounds=1)
    document = run_bench(settings, sets, some, begin_document(settings, sets))
    assert [(c["model"], c["status"]) for c in document["cells"]] == [
        ("gone", "failed"),
        ("tiny", "ok"),
    ]
    alone = Settings(models=("gone",), methods=("plain",), max_new_tokens=4, rounds=1)
    with pytest.raises(BadModel, match="no such folder"):
        run_bench(alone, sets, some, begin_document(alone, sets))


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    sets = {"a": PROMPTS[:1], "b": PROMPTS[1:]}
    path = tmp_path / "out.json"

    def interrupted(document: dict[str, Any]) -> None:
        write_document(document, path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(SMALL, sets, load, begin_document(SMALL, sets, path), save=interrupted)
    first = json.loads(path.read_text("utf-8"))
    assert {c["set"] for c in first["cells"]} == {"a"}
    assert list(tmp_path.iterdir()) == [path]
    whole = run_bench(
        SMALL, sets, load, begin_document(SMALL, sets, path), save=lambda d: write_document(d, path)
    )
    assert [c["set"] for c in whole["cells"]] == ["a", "a", "b", "b"]
    assert whole["cells"][:2] == first["cells"]
    assert json.loads(path.read_text("utf-8")) == json.loads(json.dumps(whole))

    def never(model: str, dtype: str) -> foretell.LM:
        raise AssertionError("everything is there already")

    assert (
        run_bench(SMALL, sets, never, begin_document(SMALL, sets, path))["cells"] == whole["cells"]
    )


def test_peers_lead_and_a_missing_one_is_a_failed_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str, place: Any) -> list[Any]:
        if place.model == "tiny":
            raise Unsupported("the peer is not installed; install it")
        return [Peer()]

    class Peer:
        name, about = "peer", "as its manual says"

        def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
            return Run([1, 2], [1.0, 2.0], [1, 1])

    monkeypatch.setattr(runner.peers, "contenders", opened)
    sets = {"a": PROMPTS[:1]}
    settings = Settings(
        models=("x", "tiny"),
        methods=("plain",),
        peers=("transformers",),
        max_new_tokens=4,
        rounds=1,
        requests=(1, 2),
    )
    document = run_bench(settings, sets, load, begin_document(settings, sets))
    found = [
        (c["model"], c["requests"], c["contender"], c["status"], c["baseline"])
        for c in document["cells"]
    ]
    assert found == [
        ("x", 1, "peer", "ok", "peer"),
        ("x", 1, "plain", "ok", "peer"),
        ("x", 2, "plain", "ok", "plain"),
        ("tiny", 1, "plain", "ok", "plain"),
        ("tiny", 1, "transformers", "failed", None),
        ("tiny", 2, "plain", "ok", "plain"),
    ]
    assert document["cells"][0]["about"] == "as its manual says"
    assert "by_depth" not in document["cells"][0]
    assert document["cells"][1]["ratio_to_plain"]["median"] == 1


def test_a_peer_is_told_what_is_measured_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Any] = []
    monkeypatch.setattr(runner.peers, "contenders", lambda name, place: places.append(place) or [])
    lm = load("tiny", "auto")
    for dtype in ("auto", "int8"):
        runner.open_peers(
            Settings(models=("tiny",), draft="small", peers=("llama.cpp",)), "tiny", dtype, lm
        )
    assert [place.dtype for place in places] == ["float32", "int8"], "auto is what was stored"
    for place in places:
        assert (place.model, place.draft, place.device, place.threads) == (
            "tiny",
            "small",
            "cpu",
            1,
        )
        assert place.eos == lm.engine.eos == (0,)
