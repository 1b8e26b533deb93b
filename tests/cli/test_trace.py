"""`foretell trace`: the steps of a method, and the comparison with plain decoding."""

from __future__ import annotations

import json
from typing import Any

import pytest

import foretell
from foretell.core.tracing import TraceStep
from foretell.core.tree import TokenTree


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The tokens that each method is made to write; every step commits one."""
    tokens: dict[str, list[int]] = {"plain": [5, 6, 7]}

    def trace(self: Any, prompt: str, method: str, **sampling: Any) -> list[TraceStep]:
        ids = self.encode(prompt)
        return [
            TraceStep(
                len(ids) + i, TokenTree(ids[-1]), [], [], [t], ["target"], [0.5], "torch", 0.001
            )
            for i, t in enumerate(tokens[method])
        ]

    monkeypatch.setattr(foretell.LM, "trace", trace, raising=False)
    return tokens


def test_a_method_that_equals_plain_decoding(run: Any, folder: str, traced: Any) -> None:
    traced["ngram"] = [5, 6, 7]
    code, out, err = run(
        "trace", "--model", folder, "--backend", "torch", "--method", "ngram", "def"
    )
    assert (code, err) == (0, "")
    assert out.count("committed ") == 3
    assert out.endswith("\n\nidentical to plain decoding: 3 tokens\n")


def test_the_first_divergence_ends_the_trace(run: Any, folder: str, traced: Any) -> None:
    traced["ngram"] = [5, 8, 7]
    args = ["trace", "--model", folder, "--backend", "torch", "--method", "ngram", "def"]
    code, out, _ = run(*args)
    assert code == 0 and "first divergence from plain decoding: output token 2, " in out
    document = json.loads(run(*args, "--json")[1])
    assert document["schema"] == "foretell.trace/1" and document["identical"] is False
    assert document["first_divergence"]["index"] == 1
    assert document["first_divergence"]["left"]["token"] == 8
    assert [step["tokens"] for step in document["steps"]] == [[5], [8], [7]]


def test_drawn_tokens_are_not_compared(run: Any, folder: str, traced: Any) -> None:
    traced["ngram"] = [9]
    args = [
        "trace",
        "--model",
        folder,
        "--backend",
        "torch",
        "--method",
        "ngram",
        "--temperature",
        "1",
        "def",
    ]
    code, out, _ = run(*args)
    assert code == 0 and out.splitlines()[-1].startswith("not compared with plain decoding: ")
    document = json.loads(run(*args, "--json")[1])
    assert (document["compared"], document["identical"]) == (False, None)


def test_one_sample_is_traced(run: Any) -> None:
    code, out, err = run("trace", "--n", "2", "x")
    assert (code, out) == (2, "") and err == "error: trace shows one sample: leave --n out\n"
