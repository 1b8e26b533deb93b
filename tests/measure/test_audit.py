"""The auditor says "held" of what holds, and catches what does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import foretell
from foretell import cli
from foretell.core import verify
from foretell.core.cache import Cache
from foretell.core.rng import Door
from foretell.core.sampling import Target
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Sampling
from foretell.errors import BadConfig, PromptTooLong, Unsupported
from foretell.families.exact import ExactDecoder
from foretell.families.int8 import quantize
from foretell.measure import audit
from foretell.spec import resolve
from tests import tiny

TEXTS = ["def add(a, b):\n    return a + b\n\n\ndef", "The dog and the dog and the", "abcabcabc"]
SHORT = 16


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer samples and one law a method; the laws of all samplings are tested by themselves."""
    monkeypatch.setattr(audit, "SAMPLES", 32)
    if request.node.originalname != "test_the_law_is_enumerated_exactly":
        monkeypatch.setattr(audit, "SETTINGS", audit.SETTINGS[:1])


def run(method: str, dtype: torch.dtype = torch.float32, **options: Any) -> audit.Report:
    return audit.audit(tiny.lm(dtype), [method], TEXTS, max_new_tokens=SHORT, **options)


def held(report: audit.Report) -> dict[str, bool | None]:
    return {check.name: check.held for check in report.methods[0].checks}


@pytest.mark.parametrize("method", ["plain", "token-recycling:nodes=8", "draft:length=2,drafts=2"])
def test_what_holds_is_said_to_hold(method: str) -> None:
    report = run(method)
    drawn = method.startswith("draft")
    expected: dict[str, bool | None] = {
        "greedy float32": True,
        "seeds": None if drawn else True,
        "law": True,
        "two-sample": True,
        "cache": True,
    }
    assert held(report) == expected and report.held
    pattern = r"foretell \S+ audit: tiny float32 %s exact: greedy 3/3 identical, law \de-1\d, p=[\d.e-]+, cache ok"
    assert re.fullmatch(pattern % re.escape(method), report.text().splitlines()[-1])


def test_a_narrow_format_is_audited_beside_float32() -> None:
    report = run("draft:length=2", torch.bfloat16)
    assert list(held(report)) == [
        "greedy float32",
        "greedy bfloat16",
        "seeds",
        "law",
        "two-sample",
        "cache",
    ]
    assert report.held and report.dtype == "bfloat16"
    greedy = report.methods[0].checks[1].numbers
    assert greedy["identical"] + greedy["ties"] == greedy["of"] == 3
    assert report.methods[0].checks[-1].numbers.keys() == {"float32", "bfloat16"}


def test_in_8_bits_seeds_are_not_claimed_unless_bits_are_exact() -> None:
    hf = tiny.llama()
    quantize(hf)
    report = audit.audit(
        foretell.wrap(hf, tiny.tokenizer(), name="tiny"), ["ngram"], TEXTS, max_new_tokens=8
    )
    checks = {check.name: check for check in report.methods[0].checks}
    assert (
        report.held and report.numbers == "int8" and " tiny int8 ngram " in report.methods[0].line
    )
    assert checks["seeds"].held is None and "not claimed" in checks["seeds"].detail
    assert "(at most 0.1)" in checks["cache"].detail


def test_a_lossy_rule_is_lossy_and_not_failed() -> None:
    report = run("draft:rule=typical")
    assert held(report) == {
        "greedy float32": True,
        "seeds": None,
        "law": None,
        "two-sample": None,
        "cache": True,
    }
    assert report.held and report.methods[0].guarantee == "lossy: rule typical"
    assert (
        report.methods[0].checks[2].numbers["error"] > 0.01
        and " lossy: greedy 3/3" in report.methods[0].line
    )


def test_what_a_method_refuses_is_no_claim() -> None:
    report = run("superposed")
    expected = {
        "greedy float32": None,
        "seeds": None,
        "law": None,
        "two-sample": None,
        "cache": True,
    }
    assert held(report) == expected and report.held
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
    """Draws from the whole law behind a refusal, not from what the draft covered too little."""
    if target.sampler.greedy:
        return verify.walk(tree, target, rng, position)
    out = verify.sequential(tree, target, rng, position)
    node = out.path[-1] if out.path else 0
    out.token = rng.sample(target.p(node), "draft", position + tree.depths[node], 99)
    return out


def other_draws(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
    """The right law with other random numbers: only the seeds tell."""
    if target.sampler.greedy:
        return verify.walk(tree, target, rng, position)
    token = rng.sample(target.p(0), "draft", position, 99)
    return Outcome([], token, [(n, False) for n in tree.tries[0]])


@pytest.mark.parametrize(
    ("slip", "method", "caught"),
    [
        (believes, "draft", {"greedy float32", "law"}),
        (believes, "ngram:nodes=8", {"greedy float32", "law", "seeds", "two-sample"}),
        (no_residual, "draft", {"law"}),
        (other_draws, "ngram", {"seeds"}),
    ],
)
def test_a_wrong_rule_is_caught(
    slip: Any, method: str, caught: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.core.strategy.default", slip)
    report = run(method)
    failed = {name for name, good in held(report).items() if good is False}
    assert caught <= failed and not report.held
    assert f"FAILED: {', '.join(n for n in held(report) if n in failed)}" in report.methods[0].line


def test_wrong_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that leaves the row before in the place of the newest."""
    from foretell.core.cache import Cache

    commit = Cache.commit

    def sloppy(self: Cache, tokens: Any) -> None:
        commit(self, tokens)
        if self.length > 1:
            self.v[-1][:, self.length - 1] = self.v[-1][:, self.length - 2]

    monkeypatch.setattr(Cache, "commit", sloppy)
    assert held(run("draft"))["cache"] is False


def test_a_method_that_breaks_on_the_toy_model_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        rng.sample(target.p(0), "target", position)
        return verify.walk(tree, target, rng, position)

    monkeypatch.setattr("foretell.core.strategy.default", twice)
    law = next(check for check in run("ngram").methods[0].checks if check.name == "law")
    assert law.held is False and "used twice" in law.detail


# --- the pieces


class Rows:
    """Stands for a model whose fresh row is known."""

    def __init__(self, row: list[float], narrow: bool = False):
        self.row, self.narrow = row, narrow

    def score(self, tokens: Any) -> torch.Tensor:
        return torch.tensor([self.row])


def difference(
    row: list[float], dtype: torch.dtype, mine: list[int], plain: list[int], narrow: bool = False
) -> audit.Check:
    live = SimpleNamespace(ctx=SimpleNamespace(output=mine, stats=foretell.api.Stats()))
    bench = SimpleNamespace(texts=[[1, 2]])
    return audit._greedy(Rows(row, narrow), dtype, bench, [plain], [live])  # type: ignore[arg-type,list-item]


def test_a_divergence_is_a_tie_only_within_rounding() -> None:
    near, far = [16.0, 15.9, 3.0], [16.0, 15.0, 3.0]
    check = difference(near, torch.bfloat16, [5, 1], [5, 0])
    assert (
        check.held
        and "1 divergence at a tie; first: prompt 0, token 1, top-2 margin 0.1" in check.detail
    )
    assert check.numbers["differences"][0]["allowed"] == 2 * 2**-7 * 16
    assert difference(near, torch.float32, [5, 1], [5, 0]).held is False
    assert difference([16.0, 15.9999, 3.0], torch.float32, [5, 1], [5, 0]).held
    assert difference(far, torch.bfloat16, [5, 1], [5, 0]).held is False
    assert difference([16.0, 15.9, 15.95], torch.bfloat16, [5, 1], [5, 2]).held, (
        "both are near the best"
    )
    assert difference([30.0, 3.0, 3.0], torch.bfloat16, [5, 1], [5, 2]).held is False, (
        "neither is the best"
    )
    assert difference(near, torch.bfloat16, [5], [5, 0]).held is False, "ending early is no tie"
    assert difference(near, torch.bfloat16, [5, 0], [5, 0]).numbers["identical"] == 1
    assert difference(near, torch.float32, [5, 1], [5, 0], narrow=True).held, (
        "activations have 8 bits"
    )
    assert difference(far, torch.float32, [5, 1], [5, 0], narrow=True).held is False


def test_the_law_is_enumerated_exactly() -> None:
    for spec in ("plain", "ngram", "draft:length=1"):
        for setting in audit.SETTINGS:
            error, stats = audit.law_error(resolve(spec)[1], setting, 2)
            assert error < 1e-12 and len(stats) >= 3
            assert spec == "plain" or sum(s.drafted for s in stats) > 0


def test_the_permutation_test_has_its_level_and_power() -> None:
    rng = np.random.default_rng(5)
    law, other = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.3, 0.2, 0.4])
    same = [
        audit.permutation_test([rng.multinomial(64, [law, law]) for _ in range(3)], 199, k)
        for k in range(200)
    ]
    assert sum(p < 0.05 for p in same) <= 20 and min(same) >= 1 / 200
    assert audit.permutation_test([rng.multinomial(64, [law, other]) for _ in range(3)]) < audit.P
    assert audit.permutation_test([np.array([[64], [64]])]) == 1.0


def test_rare_outcomes_share_bins() -> None:
    table = audit._table([(1, 2)] * 20 + [(i, i) for i in range(40, 60)], [(1, 2)] * 40)
    assert table.sum() == 80 and table.sum(1).tolist() == [40, 40] and (table.sum(0) > 0).all()
    assert [20, 40] in table.T.tolist()


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
        document["schema"] == "foretell.measure.audit/1"
        and document["held"] is True
        and document["dtype"] == "float32"
    )
    assert [m["method"] for m in document["methods"]] == ["ngram:n=2,k=4", "plain"]
    assert {c["name"] for c in document["methods"][0]["checks"]} == {
        "greedy float32",
        "seeds",
        "law",
        "two-sample",
        "cache",
    }
    assert document["methods"][0]["checks"][0]["numbers"]["of"] == 2
    monkeypatch.setattr("foretell.core.strategy.default", believes)
    assert cli.run([*args, "--method", "ngram"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out.splitlines()[-1] and out.splitlines()[-1].startswith("foretell ")


def test_a_sampling_of_the_toy_model_is_not_empty() -> None:
    assert all(isinstance(s, Sampling) and s.temperature > 0 for s in audit.SETTINGS)


def exact_bits() -> foretell.LM:
    hf, draft = tiny.llama().to(torch.bfloat16), tiny.relative(tiny.llama()).to(torch.bfloat16)
    quantize(hf), quantize(draft)
    return foretell.wrap(hf, tiny.tokenizer(), draft, "tiny", exact_bits=True)


def test_exact_bits_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "BITS", 5)
    report = audit.audit(exact_bits(), ["draft:nodes=6"], TEXTS, max_new_tokens=SHORT)
    checks = {check.name: check for check in report.methods[0].checks}
    assert report.held
    assert checks["exact bits"].detail == "5 random steps identical"
    for dtype in ("float32", "bfloat16"):
        assert checks[f"greedy {dtype}"].numbers["identical"] == 3
    assert "greedy 3/3 identical, exact bits 5/5, law" in report.text().splitlines()[-1]


def test_bits_that_are_not_exact_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary cache and attention under a model that claims more."""
    monkeypatch.setattr(audit, "BITS", 25)
    monkeypatch.setattr(ExactDecoder, "cache_type", Cache)
    report = audit.audit(exact_bits(), ["plain"], TEXTS[:1], max_new_tokens=4)
    check = report.methods[0].checks[0]
    assert check.name == "exact bits" and check.held is False and not report.held
    assert re.match(
        r"\d+ of 25 random steps identical; step \d+, node \d+ of \d+ behind \d+ tokens: \d+ of",
        check.detail,
    )
