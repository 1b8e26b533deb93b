"""What the registry finds, as specs that laws run on."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from foretell import cards, registry
from foretell.core.distribution import Target
from foretell.core.random import Door
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig
from foretell.spec import resolve_method, split_methods
from foretell.speculation.strategy import Speculative, Strategy
from foretell.verification.acceptance import Rule, walk_tree
from tests.laws.world import PROMPT, SETTINGS, world


def test_file(path: Path) -> Path:
    """The file of tests of a module of the package."""
    place = path.relative_to(registry.PACKAGE)
    return Path(__file__).parents[1] / place.with_name(f"test_{path.name}")


def constant_of(test: Path, name: str) -> Any:
    """What a test file gives this name to, a literal; None: it has no such name."""
    for node in ast.parse(test.read_text("utf-8")).body if test.exists() else []:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return ast.literal_eval(node.value)
    return None


@cache
def variants(name: str) -> list[str]:
    """The method with its defaults, and the specs that its test file lists as SPECS; {here} is that
    file's folder.

    Where a method must be told something (the file it copies from), those specs are all there is.
    """
    path = registry.method_files()[registry.kind_of(name), name]
    test = test_file(path)
    found = []
    with contextlib.suppress(BadConfig):
        resolve_method(name)
        found.append(name)
    specs = constant_of(test, "SPECS") or ()
    found += [spec.replace("{here}", test.parent.as_posix()) for spec in specs]
    assert found, (
        f"{name} cannot do without fields, and {test.name} lists no SPECS: no law would run"
    )
    return found


def claiming(*guarantees: str, kind: str = "drafter") -> list[str]:
    """Specs of every method of the kind whose card claims one of these."""
    names = [
        n
        for n in registry.method_names(kind)
        if cards.card(n, kind).guarantee.split(":")[0] in guarantees
    ]
    return [spec for name in names for spec in variants(name)]


def is_first(spec: str) -> bool:
    """Whether it is its method's first spec, not one more of it."""
    return spec == variants(split_methods(spec)[-1].partition(":")[0])[0]


def spread_out(specs: Sequence[str]) -> list[tuple[str, str, str]]:
    """(spec, rule, setting): with every method all settings and all its rules, with its variants
    one rule in turn.

    The settings go round the rules and begin elsewhere for each spec, so that each rule meets each
    setting with several drafters. All of the product would take longer the more methods there are
    for a rule, and find nothing that these do not. A variant's tokens by `walk` are held to those
    of each seed anyway.
    """
    settings = list(SETTINGS)
    cases = []
    for start, spec in enumerate(specs):
        rules = [rule for rule in rules_for(spec) if rule != "default"]
        if is_first(spec):
            for i in range(max(len(rules), len(settings)) if rules else 0):
                setting = settings[(start + i) % len(settings)]
                cases.append((spec, rules[i % len(rules)], setting))
        elif others := [rule for rule in rules if rule != "walk"]:
            rule = others[start % len(others)]
            cases.append((spec, rule, settings[start % len(settings)]))
    return cases


def build(spec: str, rule: str = "default", nodes: int = 6) -> Strategy:
    """The spec with a fixed number of nodes, so that no timing decides which tree is verified."""
    last = split_methods(spec)[-1]
    if registry.kind_of(last.partition(":")[0]) != "drafter":
        return resolve_method(spec)[1]
    extra = f"rule={rule}" + ("" if "nodes=" in spec else f",nodes={nodes}")
    return resolve_method(f"{spec}{',' if ':' in last else ':'}{extra}")[1]


@dataclass(frozen=True)
class Asking(Rule):
    """Follows the target's samples, and keeps the trees that it is given."""

    trees: list[TokenTree] = field(default_factory=list, compare=False)

    def verify_tree(self, tree: TokenTree, target: Target, rng: Door, position: int) -> Outcome:
        self.trees.append(tree)
        return walk_tree(tree, target, rng, position)


@cache
def first_trees(spec: str) -> list[TokenTree]:
    """What the drafter drafts first, where a rule verifies it that takes any tree."""
    asking = Asking()
    built = build(spec)
    assert isinstance(built, Speculative)
    strategy = replace(built, rule=asking)
    engine = Engine(world(strategy))
    sampling = Sampling(temperature=1.0, max_new_tokens=30)
    live = engine.add(Request(PROMPT, strategy, sampling))
    for _ in engine.run():
        if live.ctx.stats.drafts == 3:
            break
    if live.error is not None:
        raise live.error.__cause__ or live.error
    return asking.trees


def takes_trees(spec: str, rule: str) -> bool:
    """Whether the rule verifies what the drafter drafts, as its first few trees tell."""
    strategy = build(spec, rule)
    assert isinstance(strategy, Speculative) and strategy.rule is not None
    drawn = strategy.drafter.draws or not strategy.rule.drawn
    return drawn and all(strategy.rule.can_verify(tree) for tree in first_trees(spec))


@cache
def rules_for(spec: str, exact: bool | None = True) -> list[str]:
    """The rules that take this drafter's trees (None: exact and lossy ones), the default first."""
    fitting = ["default"] if exact is not False else []
    for rule in registry.method_names("rule"):
        if exact is None or registry.load_method(rule, "rule").exact == exact:
            if not takes_trees(spec, rule):
                continue
            fitting.append(rule)
    return fitting
