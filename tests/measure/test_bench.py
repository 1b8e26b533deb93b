"""The bench: order, ratios and figures from invented times, failing cells, resuming, and the
command.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell import cli, registry
from foretell.errors import BadConfig, BadFile, BadModel, Unsupported
from foretell.measure import bench
from foretell.measure.bench import Method, Settings, cells, interleave, speed, spread
from foretell.measure.peers import Run
from tests import tiny

PROMPTS = ["def add(a, b):", "The quick brown fox"]
SMALL = Settings(
    models=("tiny",),
    dtypes=("float32",),
    methods=("ngram:n=2,k=3,nodes=3",),
    max_new_tokens=6,
    rounds=2,
)


class Fake:
    """Takes `seconds` a token on its own clock; notes what it is asked for."""

    about = "invented"

    def __init__(
        self,
        name: str,
        seconds: float,
        log: list[tuple[str, Any]],
        tokens: Sequence[int] = (5, 6, 7, 8),
    ):
        self.name, self.seconds, self.log, self.tokens = name, seconds, log, list(tokens)

    def forget(self) -> None:
        self.log.append((self.name, "forget"))

    def run(
        self, batch: list[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> list[Run]:
        self.log.append((self.name, batch[0][0]))
        times = [1.0 + self.seconds * i for i in range(len(self.tokens))]
        return [Run(self.tokens, times, [1] * len(self.tokens)) for _ in batch]


class Broken(Fake):
    def run(
        self, batch: list[list[int]], max_new_tokens: int, temperature: float, seed: int
    ) -> list[Run]:
        super().run(batch, max_new_tokens, temperature, seed)
        raise ArithmeticError("overflow\nat length")


def load(model: str, dtype: str) -> foretell.LM:
    return tiny.lm()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory's speed is measured elsewhere here."""
    monkeypatch.setattr(bench, "measure_bandwidth", lambda device: 1e9)


# --- the runner on invented times


def test_contenders_take_turns_prompt_by_prompt_in_shuffled_order() -> None:
    log: list[tuple[str, Any]] = []
    contenders = [Fake(name, 1.0, log) for name in "abc"]
    interleave(contenders, [[[i]] for i in range(8)], SMALL, 0.0)
    names = [n for n, what in log if what != "forget"]
    triples = [tuple(names[i : i + 3]) for i in range(0, len(names), 3)]
    assert len(triples) == 8 * (SMALL.rounds + 1) and all(
        sorted(t) == ["a", "b", "c"] for t in triples
    )
    assert len(set(triples)) > 3, "the order is never shuffled"
    prompts = [what for _, what in log if what != "forget"]
    assert prompts == [i for _ in range(3) for i in range(8) for _ in range(3)]
    assert [i for i, (_, what) in enumerate(log) if what == "forget"] == [
        turn * 27 + k for turn in range(3) for k in range(3)
    ]
    again: list[tuple[str, Any]] = []
    interleave([Fake(name, 1.0, again) for name in "abc"], [[[i]] for i in range(8)], SMALL, 0.0)
    assert again == log


def test_ratios_come_from_the_same_prompt_and_round() -> None:
    class Slowing(Fake):
        """Each run takes longer than the last one; the warm-up is absurdly slow and must not
        count.
        """

        def run(self, *args: Any) -> list[Run]:
            runs = super().run(*args)
            count = sum(name == self.name and what != "forget" for name, what in self.log)
            factor = 1e6 if count <= 2 else float(count)
            for one in runs:
                one.times = [1.0 + (t - 1.0) * factor for t in one.times]
            return runs

    log: list[tuple[str, Any]] = []
    contenders = [Slowing("plain", 0.4, log), Slowing("fast", 0.1, log)]
    base, fast = cells(contenders, interleave(contenders, [[[1]], [[2]]], SMALL, 0.0), {}, None)
    assert base["ratio"] == pytest.approx({"median": 1, "low": 1, "high": 1})
    assert (
        fast["ratio"] == fast["ratio_to_plain"] == pytest.approx({"median": 4, "low": 4, "high": 4})
    )
    assert base["tokens_per_s"]["high"] == pytest.approx(1 / (0.4 * 3))
    assert base["tokens_per_s"]["low"] == pytest.approx(1 / (0.4 * 6))
    assert fast["ttft_s"]["median"] == 1.0 and fast["tpot_s"]["low"] == pytest.approx(0.3)
    assert (
        fast["baseline"] == "plain"
        and fast["MAT"] == 1.0
        and (fast["tokens"], fast["steps"]) == (16, 12)
    )
    assert fast["timeline"] == [[1, 0, 0, 1.0], *[[1, 0, 0, pytest.approx(0.3)]] * 3]


def test_speed_counts_what_follows_the_last_first_token() -> None:
    early, late = Run([1, 2, 3], [1.0, 2.0, 3.0], [1, 1, 1]), Run([1, 2, 3, 4], [2.0, 4.0], [2, 2])
    assert speed([early]) == 1.0 and speed([late]) == 1.0
    assert speed([early, late]) == (1 + 2) / 2.0
    assert speed([Run([1], [1.0], [1])]) == 0.0


def test_a_range_leaves_a_tenth_out_on_both_sides() -> None:
    assert spread([float(i) for i in range(1, 21)]) == {"median": 10.5, "low": 3.0, "high": 18.0}
    assert spread([2.0]) == {"median": 2.0, "low": 2.0, "high": 2.0} and spread([]) is None


def test_other_tokens_are_told_with_their_place() -> None:
    log: list[tuple[str, Any]] = []
    contenders = [
        Fake("plain", 1, log),
        Fake("other", 1, log, (5, 6, 9, 8)),
        Fake("short", 1, log, (5, 6)),
    ]
    tallies = interleave(contenders, [[[1]], [[2]]], SMALL, 0.0)
    _, other, short = cells(contenders, tallies, {}, None)
    assert other["identical"] == short["identical"] == {"same": 0, "of": 4}
    assert tallies[1].first == (0, 2, [5, 6, 7, 8]) and tallies[2].first == (0, 2, [5, 6, 7, 8])


def test_who_fails_is_out_and_the_others_go_on() -> None:
    log: list[tuple[str, Any]] = []
    contenders = [Fake("plain", 1, log), Broken("b", 1, log)]
    good, bad = cells(contenders, interleave(contenders, [[[1]], [[2]]], SMALL, 0.0), {}, None)
    assert good["status"] == "ok" and bad["status"] == "failed"
    assert bad["reason"] == "ArithmeticError: overflow at length"
    assert sum(name == "b" and what != "forget" for name, what in log) == 1
    base, other = cells(
        contenders[::-1], interleave(contenders[::-1], [[[1]]], SMALL, 0.0), {}, None
    )
    assert base["status"] == "failed" and other["status"] == "ok" and other["ratio"] is None
    assert other["ratio_to_plain"]["median"] == 1


# --- our methods


def test_a_method_is_measured_step_by_step() -> None:
    lm = tiny.lm()
    ids = lm.encode("one two one two one two one")
    run = Method(lm, "draft:length=3,nodes=3").run([ids], 24, 0.0, 0)[0]
    expected = tiny.lm().generate(ids, "draft:length=3,nodes=3", max_new_tokens=24)
    assert isinstance(run, bench.Own) and run.tokens == expected.tokens and sum(run.counts) == 24
    assert run.times == sorted(run.times) and len(run.marks) == run.stats.steps + 1
    line = bench.timeline(run)
    assert sum(step[1] for step in line) == expected.stats.drafted > 0
    assert sum(step[2] for step in line) == expected.stats.accepted > 0
    assert sum(step[3] for step in line) == pytest.approx(run.times[-1])


def test_the_inside_of_a_cell_adds_up() -> None:
    lm = tiny.lm()
    contenders = [Method(lm, "plain"), Method(lm, "draft:length=3,nodes=3")]
    batches = [[lm.encode(p)] for p in PROMPTS]
    tallies = interleave(contenders, batches, dataclasses.replace(SMALL, max_new_tokens=32), 0.0)
    plain, draft = cells(contenders, tallies, {"target": 1000, "draft": 100}, 1e9)
    assert plain["bytes_per_token"] == 1000 and plain["drafted"] == 0 and plain["by_depth"] == []
    assert plain["drafted_a_step"] == {"0": plain["steps"]} and plain["MAT"] == 1
    assert draft["identical"] == {"same": 4, "of": 4} and draft["MAT"] > 1
    assert sum(n for _, n in draft["by_depth"]) >= draft["accepted"] > 0
    assert sum(int(n) * count for n, count in draft["drafted_a_step"].items()) <= draft["drafted"]
    assert 1000 / draft["MAT"] < draft["bytes_per_token"] < 1000 / draft["MAT"] + 500
    for cell in (plain, draft):
        seconds = sum(cell["step_s"].values()) * cell["steps"]
        later = cell["tokens"] - 4  # each of the four runs begins with one token
        assert cell["bandwidth_share"] == pytest.approx(
            cell["bytes_per_token"] * later / seconds / 1e9, rel=0.3
        )
        assert min(cell["step_s"].values()) >= 0 and (cell["step_s"]["draft"] > 0) == (
            cell is draft
        )
        assert cell["host_share"] == pytest.approx(
            cell["step_s"]["host"] / sum(cell["step_s"].values())
        )
    one = 2 * 2 * 2 * 256 * 8 * 4  # 2 layers' keys and values: 2 heads, 256 rows, width 8, float32
    assert plain["cache_bytes"] == one and draft["cache_bytes"] == 2 * one


def test_a_batch_runs_together_and_a_small_set_begins_again() -> None:
    settings = Settings(methods=("plain",), max_new_tokens=4, rounds=1, requests=(3,))
    document = bench.begin(settings, {"mine": PROMPTS})
    bench.bench(settings, {"mine": PROMPTS}, load, document)
    (cell,) = document["cells"]
    assert (
        cell["requests"] == 3
        and cell["prompts"] == 2
        and cell["tokens"] == 12
        and cell["tokens_per_s"]
    )
    assert cell["bytes_per_token"] is None, "a shared forward would be counted three times"
    lm = tiny.lm()
    ids = [lm.encode(p) for p in PROMPTS]
    runs = Method(lm, "plain").run([*ids, ids[0]], 4, 1.0, 7)
    assert [r.tokens for r in runs] == [
        tiny.lm().generate(i, "plain", max_new_tokens=4, temperature=1.0, seed=7 + k).tokens
        for k, i in enumerate([*ids, ids[0]])
    ]


def test_prompts_are_cut_to_a_context_and_end_alike() -> None:
    lm = tiny.lm()
    texts = [
        "one two three. " * 3,
        "def add(a, b):\n    return a",
        "The fox " * 4,
        "x = 1",
        "y",
        "z = 3",
    ]
    short, long = bench.cut(lm, texts, 20, 8), bench.cut(lm, texts, 60, 8)
    assert len(short) == len(long) == bench.LONG
    assert {len(p) for p in short} == {20} and {len(p) for p in long} == {60}
    assert all(b[-20:] == a for a, b in zip(short, long, strict=True))
    assert [lm.decode(p).endswith(texts[k * 6 // 4]) or k == 0 for k, p in enumerate(long)] == [
        True
    ] * 4
    assert lm.decode(short[0]) in texts[0] and len({tuple(p) for p in long}) == 4
    chat = [
        [{"role": "user", "content": "hello there"}],
        [{"role": "user", "content": "more of it"}],
    ]
    assert lm.decode(bench.cut(lm, chat, 12, 8)[1]).endswith("more of it")
    with pytest.raises(BadConfig, match=r"context of 900 and 8 new tokens: tiny .*holds 128"):
        bench.cut(lm, texts, 900, 8)
    with pytest.raises(BadConfig, match="all prompts together have"):
        bench.cut(lm, texts[3:], 60, 8)


def test_contexts_are_cells_of_their_own() -> None:
    sets = {"mixed": PROMPTS * 6}
    settings = Settings(
        methods=("plain", "ngram:n=2,nodes=3"), max_new_tokens=4, rounds=1, contexts=(10, 40, 4000)
    )
    told: list[tuple[int, int]] = []
    document = bench.bench(
        settings, sets, load, bench.begin(settings, sets), lambda w, *n: told.append((n[0], n[1]))
    )
    found = [(c["set"], c["context"], c["contender"], c["status"]) for c in document["cells"]]
    names = ["plain", "ngram:n=2,nodes=3"]
    assert found == [
        ("mixed", c, n, "failed" if c == 4000 else "ok")
        for c in (None, 10, 40, 4000)
        for n in names
    ]
    assert document["cells"][0]["prompts"] == 12 and document["cells"][2]["prompts"] == bench.LONG
    assert "4000" in document["cells"][-1]["reason"] and told[-1][0] == told[-1][1] == 2 * 2 * (
        12 + 3 * bench.LONG
    )


def test_memory_is_noted_beside_what_should_be_enough() -> None:
    sets, settings = (
        {"a": PROMPTS},
        Settings(methods=("plain",), max_new_tokens=4, rounds=1, requests=(1, 2)),
    )
    document = bench.bench(settings, sets, load, bench.begin(settings, sets))
    limit, one = document["memory_limit"], document["cells"][0]["cache_bytes"]
    both = sum(4 * sum(p.numel() for p in m.hf.parameters()) for m in tiny.lm().models.values())  # type: ignore[attr-defined]
    assert limit == {
        "weights": both,
        "caches": 2 * one,
        "bytes": int(1.15 * both) + 2 * one + 300_000_000,
    }
    assert document["peak_memory"] > 1e6


def test_weights_count_once_and_those_of_a_file_as_it_says() -> None:
    class File:
        weight_bytes = 7

    model = tiny.lm().models["target"]
    assert bench.held_bytes(model) == 4 * sum(p.numel() for p in model.hf.parameters())  # type: ignore[attr-defined]
    assert bench.held_bytes(File()) == 7 and bench.held_bytes(None) == 0  # type: ignore[arg-type]


def test_the_peak_can_be_forgotten() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not let a process forget its peak")
    block = torch.ones(1 << 26)  # 256 MB
    high = bench.peak_memory()
    del block
    bench.forget_peak()
    low = bench.peak_memory()
    assert high is not None and low is not None and low < high - (1 << 27)


def test_what_failed_is_tried_again(tmp_path: Path) -> None:
    sets, path = {"a": PROMPTS[:1], "b": PROMPTS[1:]}, tmp_path / "out.json"
    settings = dataclasses.replace(SMALL, methods=("draft:nodes=3",))
    without = bench.bench(
        settings, sets, lambda m, d: tiny.lm(draft=False), bench.begin(settings, sets, path)
    )
    assert [c["status"] for c in without["cells"]] == ["ok", "failed"] * 2
    without["cells"][3] = without["cells"][3] | {
        "status": "ok"
    }  # only the first set has a failure left
    bench.write(without, path)
    whole = bench.bench(settings, sets, load, bench.begin(settings, sets, path))
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


def test_nothing_learnt_is_kept_or_shared() -> None:
    lm = tiny.lm()
    one, two = Method(lm, "token-recycling:nodes=4"), Method(lm, "token-recycling:nodes=4")
    one.run([lm.encode(PROMPTS[0])], 6, 0.0, 0)
    assert one.engine.stores and not two.engine.stores and not lm.engine.stores
    one.forget()
    assert not one.engine.stores


def test_weights_are_counted_once_and_embeddings_only_as_head() -> None:
    lm = tiny.lm(torch.bfloat16)
    model = tiny.llama()
    table = model.get_input_embeddings().weight.numel()
    assert bench.weight_bytes(lm.models["target"]) == 2 * (
        sum(p.numel() for p in model.parameters()) - table
    )
    tied = foretell.wrap(tiny.gpt2(), tiny.tokenizer())
    assert bench.weight_bytes(tied.models["target"]) == 4 * sum(
        p.numel() for p in tiny.gpt2().parameters()
    )
    assert bench.weight_bytes(None) is None


def test_the_speed_of_memory_is_the_best_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ticks = iter(range(1000))
    gaps = iter([5.0, 4.0, 0.5] + [9.0] * 9)
    now = [0.0]

    def clock() -> float:
        if next(ticks) % 2:
            now[0] += next(gaps)
        return now[0]

    monkeypatch.setattr(bench.time, "perf_counter", clock)
    assert bench.measure_bandwidth("cpu", 1 << 16) == (1 << 16) / 0.5


# --- a whole document


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
    document = bench.bench(
        settings,
        sets,
        load,
        bench.begin(settings, sets),
        lambda what, done, total: told.append((done, total)),
    )
    document = json.loads(json.dumps(document))
    assert (
        document["schema"] == "foretell.measure.bench/1"
        and document["bandwidth"]["bytes_per_s"] == 1e9
    )
    keys = [(c["set"], c["temperature"], c["contender"]) for c in document["cells"]]
    assert keys == [
        (s, t, c) for s in "ab" for t in (0.0, 0.8) for c in ("plain", "ngram:n=2,nodes=3", "draft")
    ]
    assert all(c["status"] == "ok" for c in document["cells"])
    assert (
        document["machine"]["threads"] == torch.get_num_threads() and document["peak_memory"] > 1e6
    )
    assert (
        document["models"][0]["seconds"]["64"]["1"] > 0
        and document["models"][0]["draft_weight_bytes"] > 0
    )
    assert [d for d, _ in told] == sorted(d for d, _ in told) and told[-1][0] == told[-1][
        1
    ] == 3 * 2 * 2 * 3


def test_what_cannot_run_is_reported_and_the_rest_goes_on() -> None:
    sets = {"a": PROMPTS[:1]}
    settings = Settings(methods=("draft", "ngram:zzz=1", "ngram"), max_new_tokens=4, rounds=1)
    document = bench.bench(
        settings, sets, lambda m, d: tiny.lm(draft=False), bench.begin(settings, sets)
    )
    status = {c["contender"]: (c["status"], c.get("reason", "")) for c in document["cells"]}
    assert status["plain"][0] == status["ngram"][0] == "ok"
    assert status["draft"][0] == "failed" and "'draft' model" in status["draft"][1]
    assert status["ngram:zzz=1"][0] == "failed" and "zzz" in status["ngram:zzz=1"][1]
    sets = {"long": ["x" * 5000], "chat": [[{"role": "user", "content": "hi"}]]}
    settings = Settings(methods=("plain",), max_new_tokens=4, rounds=1)
    document = bench.bench(settings, sets, load, bench.begin(settings, sets))
    assert [
        "shorten" in document["cells"][0]["reason"],
        "chat template" in document["cells"][1]["reason"],
    ] == [True] * 2


def test_one_of_several_models_may_be_missing() -> None:
    def some(model: str, dtype: str) -> foretell.LM:
        if model == "gone":
            raise BadModel("gone: no such folder; give another")
        return tiny.lm()

    sets = {"a": PROMPTS[:1]}
    settings = Settings(models=("gone", "tiny"), methods=("plain",), max_new_tokens=4, rounds=1)
    document = bench.bench(settings, sets, some, bench.begin(settings, sets))
    assert [(c["model"], c["status"]) for c in document["cells"]] == [
        ("gone", "failed"),
        ("tiny", "ok"),
    ]
    alone = Settings(models=("gone",), methods=("plain",), max_new_tokens=4, rounds=1)
    with pytest.raises(BadModel, match="no such folder"):
        bench.bench(alone, sets, some, bench.begin(alone, sets))


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    sets, path = {"a": PROMPTS[:1], "b": PROMPTS[1:]}, tmp_path / "out.json"

    def interrupted(document: dict[str, Any]) -> None:
        bench.write(document, path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.bench(SMALL, sets, load, bench.begin(SMALL, sets, path), save=interrupted)
    first = json.loads(path.read_text("utf-8"))
    assert {c["set"] for c in first["cells"]} == {"a"} and list(tmp_path.iterdir()) == [path]
    whole = bench.bench(
        SMALL, sets, load, bench.begin(SMALL, sets, path), save=lambda d: bench.write(d, path)
    )
    assert [c["set"] for c in whole["cells"]] == ["a", "a", "b", "b"] and whole["cells"][
        :2
    ] == first["cells"]
    assert json.loads(path.read_text("utf-8")) == json.loads(json.dumps(whole))

    def never(model: str, dtype: str) -> foretell.LM:
        raise AssertionError("everything is there already")

    assert (
        bench.bench(SMALL, sets, never, bench.begin(SMALL, sets, path))["cells"] == whole["cells"]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rounds": 5}, "another settings.rounds (2 there, 5 here)"),
        ({"methods": ("plain",)}, "another settings.methods"),
        ({"temperatures": (0.5,)}, "settings.temperatures"),
        ({"device": "cuda"}, "another settings.device (None there, cuda here)"),
    ],
)
def test_a_file_of_other_settings_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    sets, path = {"a": PROMPTS}, tmp_path / "out.json"
    bench.write(bench.begin(SMALL, sets), path)
    other = dataclasses.replace(SMALL, **change)
    with pytest.raises(BadFile) as raised:
        bench.begin(other, sets, path)
    assert said in str(raised.value) and "name another file" in str(raised.value)
    assert bench.begin(SMALL, sets, path)["cells"] == []


def test_other_prompts_machines_and_files_are_refused(tmp_path: Path) -> None:
    sets, path = {"a": PROMPTS}, tmp_path / "out.json"
    document = bench.begin(SMALL, sets)
    bench.write(document, path)
    with pytest.raises(BadFile, match=r"settings\.sets"):
        bench.begin(SMALL, {"a": ["other"]}, path)
    elsewhere = copy.deepcopy(document)
    elsewhere["machine"]["threads"] = 99
    bench.write(elsewhere, path)
    with pytest.raises(BadFile, match=r"machine\.threads \(99 there"):
        bench.begin(SMALL, sets, path)
    for text in ("{", "[]", '{"schema": "foretell.measure.audit/1", "cells": []}'):
        path.write_text(text)
        with pytest.raises(BadFile, match="no document of foretell bench"):
            bench.begin(SMALL, sets, path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"requests": (0,)},
        {"methods": ()},
        {"models": ("a", "a")},
        {"max_new_tokens": 1},
        {"temperatures": (-1.0,)},
        {"contexts": (0,)},
        {"contexts": (5, 5)},
        {"peers": ("transformer",)},
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadConfig):
        Settings(**wrong)


def test_the_sets_that_ship_are_the_default(tmp_path: Path) -> None:
    assert list(bench.read_sets([])) == list(bench.SETS) and all(bench.read_sets([]).values())
    (tmp_path / "code.jsonl").write_text('{"prompt": "a"}\n')
    assert bench.read_sets([tmp_path / "code.jsonl"]) == {"code": ["a"]}
    with pytest.raises(BadConfig, match="already a set 'code'"):
        bench.read_sets(["code", tmp_path / "code.jsonl"])


# --- peers


def test_peers_lead_and_a_missing_one_is_a_failed_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str, place: Any) -> list[Any]:
        if place.model == "tiny":
            raise Unsupported("the peer is not installed; install it")
        return [Peer()]

    class Peer:
        name, about = "peer", "as its manual says"

        def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
            return Run([1, 2], [1.0, 2.0], [1, 1])

    monkeypatch.setattr(bench.peers, "contenders", opened)
    sets = {"a": PROMPTS[:1]}
    settings = Settings(
        models=("x", "tiny"),
        methods=("plain",),
        peers=("transformers",),
        max_new_tokens=4,
        rounds=1,
        requests=(1, 2),
    )
    document = bench.bench(settings, sets, load, bench.begin(settings, sets))
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
    assert (
        document["cells"][0]["about"] == "as its manual says"
        and "by_depth" not in document["cells"][0]
    )
    assert document["cells"][1]["ratio_to_plain"]["median"] == 1


def test_a_peer_is_told_what_is_measured_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Any] = []
    monkeypatch.setattr(bench.peers, "contenders", lambda name, place: places.append(place) or [])
    lm = load("tiny", "auto")
    for dtype in ("auto", "int8"):
        bench._opened_peers(
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


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    tiny.save(tiny.llama(), path / "model")
    (path / "mine.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], folder: Path) -> Any:
    def call(*args: str) -> tuple[int, str, str]:
        words = [
            "--model",
            f"{folder}/model",
            "--prompts",
            f"{folder}/mine.jsonl",
            "--rounds",
            "1",
            "--threads",
            "1",
            "--max-new-tokens",
            "4",
            *args,
        ]
        code = cli.run(["bench", *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def test_the_command_prints_a_table_and_writes_files(run: Any, tmp_path: Path) -> None:
    files = ["--json", f"{tmp_path}/o.json", "--html", f"{tmp_path}/o.html"]
    methods = ["--methods", "ngram:n=2,k=4,nodes=3,copyspec:nodes=2"]
    code, out, err = run(*methods, *files)
    assert (
        code == 0
        and err == ""
        and ", float32, greedy, one request\n" in out
        and "mine" in out
        and "tok/s" in out
    )
    assert "ngram:n=2,k=4,nodes=3" in out and "copyspec:nodes=2" in out and "MAT" in out
    document = json.loads((tmp_path / "o.json").read_text("utf-8"))
    assert [c["contender"] for c in document["cells"]] == [
        "plain",
        "ngram:n=2,k=4,nodes=3",
        "copyspec:nodes=2",
    ]
    assert "<svg" in (tmp_path / "o.html").read_text("utf-8")
    assert run(*methods, *files)[0] == 0
    assert json.loads((tmp_path / "o.json").read_text("utf-8")) == document
    code, out, err = run(*methods, *files, "--seed", "3")
    assert (
        code == 2
        and out == ""
        and "settings.seed (0 there, 3 here)" in err
        and err.count("\n") == 1
    )


def test_contexts_are_an_option(run: Any, tmp_path: Path) -> None:
    code, out, err = run(
        "--methods",
        "plain",
        "--contexts",
        "6,12",
        "--requests",
        "1,2",
        "--html",
        f"{tmp_path}/o.html",
    )
    assert (
        code == 0
        and err == ""
        and "behind 6 tokens" in out
        and "behind 12 tokens" in out
        and "mixed" in out
    )
    page = (tmp_path / "o.html").read_text("utf-8")
    assert "Cost of a token by context" in page and "Cost of a token by requests at once" in page
    code, out, err = run("--contexts", "1k")
    assert code == 2 and err == "error: --contexts 1k: write numbers separated by commas\n"


def test_a_failed_cell_is_exit_1(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ArithmeticError("overflow")

    monkeypatch.setattr(registry.load("ngram", "drafter"), "propose", broken)
    code, out, err = run("--methods", "ngram:nodes=3,draft", "--json", "-")
    document = json.loads(out)
    assert code == 1 and {c["contender"]: c["status"] for c in document["cells"]} == {
        "plain": "ok",
        "ngram:nodes=3": "failed",
        "draft": "failed",
    }
    assert (
        "ArithmeticError: overflow (mine)" in err and err.count("failed: ") == err.count("\n") == 2
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--methods", ","], "--methods is empty"),
        (["--methods", "ngrm"], "did you mean ngram"),
        (["--peers", "llama"], "unknown peer 'llama'"),
        (["--temperature", "hot"], "--temperature hot"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--requests", "0"], "requests=0"),
        (["--requests", ","], "requests=()"),
        (["--rounds", "0"], "rounds=0"),
        (["--threads", "0"], "--threads"),
        (["--model", "./nowhere"], "no such folder"),
        (["--dtype", "int3"], "dtype='int3'"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--json", "./no/such.json"], "folder does not exist"),
        (["--html", "."], "a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(run: Any, args: list[str], said: str) -> None:
    code, out, err = run(*args)
    assert (
        code == 2
        and out == ""
        and err.startswith("error: ")
        and err.count("\n") == 1
        and said in err
    )
