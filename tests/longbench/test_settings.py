"""Budgets rewrite specs, and what cannot be measured is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.errors import BadConfig, UnknownMethod
from foretell.longbench.settings import Settings, budget_rows


@pytest.mark.parametrize(
    ("budget", "rows"), [("10%", 205), ("0.1", 205), ("128", 128), ("100%", 2048), ("0.01%", 1)]
)
def test_a_budget_is_a_share_or_a_number(budget: str, rows: int) -> None:
    assert budget_rows(budget, 2048) == rows


@pytest.mark.parametrize("budget", ["", "x", "0", "-5", "2.5", "0%", "120%", "nan", "inf"])
def test_other_budgets_are_refused(budget: str) -> None:
    with pytest.raises(BadConfig, match="a number of rows, or a share of the length"):
        budget_rows(budget, 2048)


def test_budgets_rewrite_every_spec() -> None:
    specs = ("none", "snapkv:budget=99,window=8", "h2o:every=16", "streaming-llm:sinks=2", "quest")
    found = Settings(kv=specs, budgets=("10%", "300")).contenders(1000)
    assert [one.name for one in found[:3]] == ["none", f"{specs[1]} at 10%", f"{specs[1]} at 300"]
    kv: list[Any] = [one.kv for one in found]
    assert kv[0] is None and len(kv) == 9
    assert [one.budget for one in (*kv[1:5], *kv[7:])] == [100, 300, 100, 300, 96, 288]
    assert kv[1].window == 8 and kv[3].every == 16
    assert [one.sinks + one.window for one in kv[5:7]] == [100, 300]
    (_, paged) = Settings(kv=("lserve",), budgets=("25%",)).contenders(1000)
    assert paged.kv.budget == 192  # three pages of 64
    (_, both) = Settings(kv=("gear:bits=2+snapkv",), budgets=("300",)).contenders(1000)
    of_both: Any = both.kv
    assert of_both.find_part("evictor").budget == 300 and of_both.find_part("encoder").bits == 2
    found = Settings(kv=("snapkv:budget=99",)).contenders(1000)
    assert [one.name for one in found] == ["none", "snapkv:budget=99"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tasks": ("nothing",)}, "--tasks='nothing': must be one of needles, keys"),
        ({"tasks": ()}, "--tasks: names nothing"),
        ({"modes": ("chat",)}, "--modes='chat'"),
        ({"lengths": ()}, "--lengths: names nothing"),
        ({"lengths": (2048, 100)}, "--lengths=100: must be at least 256 tokens"),
        ({"limit": 0}, "--limit=0"),
        ({"budgets": ("10%",)}, "--budgets: no cache policy is named"),
        ({"budgets": ("10%",), "kv": ("none",)}, "--budgets: no cache policy is named"),
        ({"text": "a.txt"}, "--text: perplexity alone reads it"),
        ({"kv": ("snapkv",), "budgets": ("20",)}, "snapkv:budget=20: must be at least 33"),
        ({"kv": ("streaming-llm",), "budgets": ("4",)}, "streaming-llm:window=0"),
        ({"kv": ("gear+offload",), "budgets": ("400",)}, "--budgets: gear+offload has no budget"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig) as refused:
        Settings(**given)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UnknownMethod):
        Settings(kv=("snapvk",))
