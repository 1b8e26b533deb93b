"""The auditor says "held" of what holds, and catches what does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell import audit, cli
from foretell.audit import auditor, checks, law
from foretell.audit.report import FAILED, HELD, NO_CLAIM, UNTESTED
from foretell.cache.cache import Cache
from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.drafters.lookup.ngram import Ngram
from foretell.errors import BadConfig, PromptTooLong, Unsupported
from foretell.models.decoder.exact import ExactDecoder
from foretell.models.decoder.packed import pack_layers
from foretell.verification import acceptance as verify
from tests import tiny

TEXTS = ["def add(a, b):\n    return a + b\n\n\ndef", "The dog and the dog and the", "abcabcabc"]
SHORT = 16


@pytest.fixture(autouse=True)
def one_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer samples and one law for each method; all samplings are tested in test_law.py."""
    monkeypatch.setattr(auditor, "SAMPLES", 32)
    monkeypatch.setattr(law, "SAMPLINGS", law.SAMPLINGS[:1])


def run(method: str, dtype: torch.dtype = torch.float32, **options: Any) -> audit.Report:
    options = {"max_new_tokens": SHORT} | options
    return audit.audit(tiny.lm(dtype), [method], TEXTS, **options)


def verdicts(report: audit.Report) -> dict[str, str]:
    return {check.name: check.verdict for check in report.methods[0].checks}


@pytest.mark.parametrize("method", ["plain", "token-recycling:nodes=8", "draft:length=2,drafts=2"])
def test_what_holds_is_said_to_hold(method: str) -> None:
    report = run(method)
    drawn = method.startswith("draft")
    expected = {
        "greedy float32": HELD,
        "seeds": NO_CLAIM if drawn else HELD,
        "samples": HELD,
        "law": HELD,
        "ends": HELD,
        "cache": HELD,
    }
    assert verdicts(report) == expected and report.all_held


def test_the_line_to_paste_says_what_each_figure_was_taken_on() -> None:
    report = run("token-recycling:nodes=8")
    start = f"foretell {foretell.__version__} audit: tiny float32 token-recycling:nodes=8 exact: "
    parts = report.text().splitlines()[-1].removeprefix(start).split("; ")
    patterns = [
        r"greedy 3/3 identical \(3 given prompts, 16 tokens each, float32, torch\)",
        r"law \de-1\d \(toy model, 1 samplings, \d+ outcomes\)",
        r"samples p=[\d.e-]+ \(96 of 3 prompts, float32, "
        r"would find a total variation of 0.1 over its cells in \d+% of runs\)",
        r"cache ok \(float32\)",
    ]
    assert len(parts) == len(patterns)
    for part, pattern in zip(parts, patterns, strict=True):
        assert re.fullmatch(pattern, part), part


def test_a_narrow_format_is_audited_beside_float32() -> None:
    report = run("draft:length=2", torch.bfloat16)
    assert list(verdicts(report)) == [
        "greedy float32",
        "greedy bfloat16",
        "seeds",
        "samples",
        "law",
        "ends",
        "cache",
    ]
    assert report.all_held and report.dtype == "bfloat16"
    greedy = report.methods[0].checks[1].numbers
    assert greedy["identical"] + greedy["ties"] == greedy["of"] == 3
    assert report.methods[0].checks[-1].numbers.keys() == {"float32", "bfloat16"}


def test_in_8_bits_seeds_are_not_claimed_unless_bits_are_exact() -> None:
    hf = tiny.llama()
    pack_layers(hf, "int8")
    report = audit.audit(
        foretell.wrap(hf, tiny.tokenizer(), name="tiny"), ["ngram"], TEXTS, max_new_tokens=8
    )
    by_name = {check.name: check for check in report.methods[0].checks}
    assert (
        report.all_held
        and report.matrices == "int8"
        and " tiny int8 ngram " in report.methods[0].line
    )
    assert by_name["seeds"].verdict == NO_CLAIM and "not claimed" in by_name["seeds"].detail
    assert "(at most 0.1)" in by_name["cache"].detail


def test_a_lossy_rule_is_lossy_and_not_failed() -> None:
    report = run("draft:rule=typical")
    assert verdicts(report) == {
        "greedy float32": HELD,
        "seeds": NO_CLAIM,
        "samples": NO_CLAIM,
        "law": NO_CLAIM,
        "ends": NO_CLAIM,
        "cache": HELD,
    }
    assert report.all_held and report.methods[0].guarantee == "lossy: rule typical"
    assert (
        report.methods[0].checks[3].numbers["error"] > 0.01
        and " lossy: greedy 3/3" in report.methods[0].line
    )


def test_what_a_method_refuses_is_no_claim() -> None:
    report = run("superposed")
    expected = {
        "greedy float32": NO_CLAIM,
        "seeds": NO_CLAIM,
        "samples": NO_CLAIM,
        "law": NO_CLAIM,
        "ends": NO_CLAIM,
        "cache": HELD,
    }
    assert verdicts(report) == expected and report.all_held
    assert (
        "temperature" in report.methods[0].checks[1].detail
        and "samples not compared" in report.methods[0].line
    )


# --- mistakes put in on purpose


def believes(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """Accepts whatever was drafted."""
    node, path = 0, []
    while tree.tries[node]:
        node = tree.tries[node][0]
        path.append(node)
    return Outcome(path, int(target.p(node).argmax()), [(n, True) for n in path])


def no_residual(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """Draws from the whole law after a refusal, not from what the draft covered too little."""
    if target.sampler.greedy:
        return verify.walk_tree(tree, target, rng, position)
    out = verify.verify_in_order(tree, target, rng, position)
    node = out.path[-1] if out.path else 0
    out.token = rng.sample(target.p(node), "draft", position + tree.depths[node], 99)
    return out


def other_draws(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """The right law with other random numbers: only the seeds tell."""
    if target.sampler.greedy:
        return verify.walk_tree(tree, target, rng, position)
    token = rng.sample(target.p(0), "draft", position, 99)
    return Outcome([], token, [(n, False) for n in tree.tries[0]])


@pytest.mark.parametrize(
    ("slip", "method", "caught"),
    [
        (believes, "draft", {"greedy float32", "law"}),
        (believes, "ngram:nodes=8", {"greedy float32", "law", "seeds", "samples"}),
        (no_residual, "draft", {"law"}),
        (other_draws, "ngram", {"seeds"}),
    ],
)
def test_a_wrong_rule_is_caught(
    slip: Any, method: str, caught: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.speculation.strategy.verify_by_default", slip)
    report = run(method)
    failed = report.methods[0].checks_with(FAILED)
    assert caught <= set(failed) and not report.all_held
    assert f"FAILED: {', '.join(failed)}" in report.methods[0].line


def test_wrong_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that leaves the row before in the place of the newest."""
    from foretell.cache.cache import Cache

    commit = Cache.commit

    def sloppy(self: Cache, tokens: Any) -> None:
        commit(self, tokens)
        if self.length > 1:
            self.v[-1][:, self.length - 1] = self.v[-1][:, self.length - 2]

    monkeypatch.setattr(Cache, "commit", sloppy)
    assert verdicts(run("draft"))["cache"] == FAILED


def test_a_method_that_breaks_on_the_toy_model_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        rng.sample(target.p(0), "target", position)
        return verify.walk_tree(tree, target, rng, position)

    monkeypatch.setattr("foretell.speculation.strategy.verify_by_default", twice)
    found = next(check for check in run("ngram").methods[0].checks if check.name == "law")
    assert found.verdict == FAILED and "used twice" in found.detail


# --- where nothing is drafted


def test_a_pass_without_drafts_is_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that proposes nothing is exact, and nothing has been shown."""
    monkeypatch.setattr(
        Ngram, "propose", lambda self, ctx, state, budget: TokenTree(ctx.tokens[-1])
    )
    report = run("ngram")
    expected = ["greedy float32", "seeds", "samples", "law", "ends", "cache"]
    assert not report.all_held and report.methods[0].checks_with(UNTESTED) == expected
    assert report.methods[0].line.endswith(
        f"cache untested (float32); UNTESTED: {', '.join(expected)}"
    )
    assert "not put to the test; give prompts in which it drafts" in report.text()
    folder = tiny.save(tiny.llama(), tmp_path)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abcabc"}')
    args = [
        "audit",
        "--model",
        str(folder),
        "--max-new-tokens",
        "4",
        "--method",
        "ngram",
        "--prompts",
        str(prompts),
    ]
    assert cli.run(args) == 1
    assert "UNTESTED: greedy float32" in capsys.readouterr().out


def test_a_method_that_never_drafts_can_pass() -> None:
    report = run("plain")
    assert report.all_held and "this method drafts nothing" in report.methods[0].checks[0].detail


# --- arguments and the command


def test_what_cannot_be_audited_is_said_before_anything_runs() -> None:
    lm = tiny.lm(draft=False)
    with pytest.raises(Unsupported, match="draft"):
        audit.audit(lm, ["plain", "draft"])
    with pytest.raises(PromptTooLong):
        audit.audit(lm, ["plain"], ["x y " * 400])
    with pytest.raises(BadConfig, match="max_new_tokens"):
        audit.audit(lm, ["plain"], max_new_tokens=0)
    assert lm.models["target"].calls == 0


def test_the_built_in_prompts_fit_a_small_context() -> None:
    assert len(audit.PROMPTS) == 8 and all(
        isinstance(p, str) and 20 < len(p) < 200 for p in audit.PROMPTS
    )


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tiny.llama(), tmp_path)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in TEXTS[:2]))
    args = [
        "audit",
        "--model",
        str(folder),
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--max-new-tokens",
        "8",
    ]
    assert cli.run([*args, "--method", "ngram:n=2,k=4,plain", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (
        document["schema"] == "foretell.measure.audit/2"
        and document["held"] is True
        and document["dtype"] == "float32"
    )
    assert [m["method"] for m in document["methods"]] == ["ngram:n=2,k=4", "plain"]
    assert {c["name"] for c in document["methods"][0]["checks"]} == {
        "greedy float32",
        "seeds",
        "law",
        "ends",
        "samples",
        "cache",
    }
    assert document["methods"][0]["checks"][0]["numbers"]["of"] == 2
    monkeypatch.setattr("foretell.speculation.strategy.verify_by_default", believes)
    assert cli.run([*args, "--method", "ngram"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out.splitlines()[-1] and out.splitlines()[-1].startswith("foretell ")


def exact_bits() -> foretell.LM:
    hf, draft = tiny.llama().to(torch.bfloat16), tiny.relative(tiny.llama()).to(torch.bfloat16)
    pack_layers(hf, "int8"), pack_layers(draft, "int8")
    return foretell.wrap(hf, tiny.tokenizer(), draft, "tiny", exact_bits=True)


def test_exact_bits_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "RANDOM_STEPS", 5)
    report = audit.audit(exact_bits(), ["draft:nodes=6"], TEXTS, max_new_tokens=SHORT)
    by_name = {check.name: check for check in report.methods[0].checks}
    assert report.all_held
    assert by_name["exact bits"].detail == "5 random steps identical"
    for dtype in ("float32", "bfloat16"):
        assert by_name[f"greedy {dtype}"].numbers["identical"] == 3
    assert "; exact bits 5/5 random steps; law" in report.text().splitlines()[-1]


def test_bits_that_are_not_exact_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary cache and attention under a model that claims more."""
    monkeypatch.setattr(checks, "RANDOM_STEPS", 25)
    monkeypatch.setattr(ExactDecoder, "cache_type", Cache)
    report = audit.audit(exact_bits(), ["plain"], TEXTS[:1], max_new_tokens=4)
    check = report.methods[0].checks[0]
    assert check.name == "exact bits" and check.verdict == FAILED and not report.all_held
    assert re.match(
        r"\d+ of 25 random steps identical; step \d+, node \d+ of \d+ after \d+ tokens: \d+ of",
        check.detail,
    )
