"""A method is a file: found by its name, read without being imported, listed nowhere."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretell import registry
from foretell.cards import card
from foretell.core.request import Request
from foretell.errors import BadConfig, UnknownMethod
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative
from tests import laws

METHOD = '''"""Drafts the last token once more.

Prose.

Paper: none
Guarantee: exact
Cost: target 1
Needs: nothing
Trains: nothing
Differs: in nothing known
"""

from dataclasses import dataclass

from foretell.core.drafter import Drafter
from foretell.core.tree import TokenTree


@dataclass(frozen=True)
class OnceMore(Drafter):
    """How often."""

    times: int = 2

    def propose(self, ctx, state, budget):
        size = min(self.times, budget - 1, ctx.depth)
        return TokenTree(ctx.tokens[-1]).chain([ctx.tokens[-1]] * size, "once-more")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another package's folder of methods, joined by an entry point."""
    (tmp_path / "their_methods" / "drafters").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [SimpleNamespace(value="their_methods")]
    )
    registry.method_files.cache_clear()
    before = set(sys.modules)
    yield tmp_path / "their_methods"
    for name in set(sys.modules) - before:
        del sys.modules[name]
    monkeypatch.undo()
    registry.method_files.cache_clear()


def test_a_file_is_all_it_takes_to_add_a_drafter(folder: Path) -> None:
    assert "once-more" not in registry.methods()
    (folder / "drafters" / "once_more.py").write_text(METHOD, "utf-8")
    registry.method_files.cache_clear()
    assert "once-more" in registry.methods() and registry.kind_of("once-more") == "drafter"
    found = card("once-more")
    assert found.summary == "Drafts the last token once more." and found.guarantee == "exact"
    assert found.defaults == {"times": 2} and found.prose == "Prose."
    assert not any("once_more" in name for name in sys.modules), (
        "listing and reading a card must not import it"
    )
    for rule in ("default", "coin", "sequential", "walk"):
        laws.check_law(laws.build("once-more:times=1", rule), "penalties")
    laws.check_greedy([laws.build("once-more")], 40)
    laws.check_cost(laws.build("once-more"), found.cost, {}, exact=True)
    name, strategy = resolve_method("once-more:times=3,rule=coin,nodes=7")
    assert name == "once-more" and isinstance(strategy, Speculative) and strategy.nodes == 7
    assert strategy.drafter.times == 3  # type: ignore[attr-defined]
    assert Request([1], strategy).strategy is strategy


def test_two_files_of_one_name_are_told(folder: Path) -> None:
    (folder / "drafters" / "ngram.py").write_text(METHOD, "utf-8")
    registry.method_files.cache_clear()
    with pytest.raises(BadConfig, match="two files claim the drafter 'ngram'"):
        registry.method_files()


def test_a_card_without_a_label_is_told(folder: Path) -> None:
    (folder / "drafters" / "once_more.py").write_text(
        METHOD.replace("Cost: target 1\n", ""), "utf-8"
    )
    registry.method_files.cache_clear()
    with pytest.raises(BadConfig, match="lacks Cost"):
        card("once-more")


def test_a_file_without_its_class_is_told(folder: Path) -> None:
    (folder / "drafters" / "once_more.py").write_text(
        METHOD.replace("class OnceMore", "class Another"), "utf-8"
    )
    registry.method_files.cache_clear()
    with pytest.raises(BadConfig, match="lacks the class OnceMore"):
        card("once-more")


def test_a_method_that_cannot_be_imported_stays_out_of_the_way(folder: Path) -> None:
    (folder / "drafters" / "once_more.py").write_text(
        METHOD + "\nimport a_module_nobody_has\n", "utf-8"
    )
    registry.method_files.cache_clear()
    assert card("once-more").name in registry.methods()
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            registry.load_method("once-more", "drafter")


@pytest.mark.parametrize(("kind", "name"), sorted(registry.method_files()))
def test_every_card_is_whole_and_names_its_class(kind: str, name: str) -> None:
    found = card(name, kind)
    assert found.summary.endswith((".", "?")) and len(found.summary) <= 97
    assert found.guarantee.split(":")[0] in ("exact", "greedy", "bounded", "lossy")
    assert all(getattr(found, label) for label in ("paper", "cost", "needs", "trains", "differs"))
    cls = registry.load_method(name, kind)
    assert cls.__doc__ and [*found.defaults] == [field.name for field in dataclasses.fields(cls)]
    assert {k: getattr(cls, k) for k in found.defaults} == found.defaults
    with contextlib.suppress(BadConfig):  # a method that must be told something says so
        assert cls() == cls(**found.defaults)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UnknownMethod, match="unknown method 'n-gram'; did you mean ngram"):
        resolve_method("n-gram")
    with pytest.raises(UnknownMethod, match="token-recycling"):
        resolve_method("token_recycling")
    with pytest.raises(UnknownMethod, match=r"field of ngram 'kk'.*k"):
        resolve_method("ngram:kk=3")
    with pytest.raises(UnknownMethod, match=r"rule 'sequental'.*sequential"):
        resolve_method("ngram:rule=sequental")


WRONG = [
    "ngram:n",
    "ngram:n=x",
    "ngram:n=0",
    "ngram:nodes=-1",
    "ngram:nodes=2000",
    "draft:confidence=no",
]


@pytest.mark.parametrize("spec", WRONG)
def test_a_bad_spec_is_one_line(spec: str) -> None:
    with pytest.raises(BadConfig) as caught:
        resolve_method(spec)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_a_field_of_tokens_takes_ids_or_a_text_file(tmp_path: Path) -> None:
    from foretell.drafters.lookup.input_guided import InputGuided

    for text, ids in (("1 2 3", (1, 2, 3)), ("", ()), ("()", ()), (" 7 ", (7,))):
        assert resolve_method(f"input-guided:source={text},n=2") == (
            "input-guided",
            Speculative(InputGuided(ids, n=2)),
        )
    file = tmp_path / "a text.txt"
    file.write_bytes("é\r\n\n".encode())
    _, strategy = resolve_method(
        f"input-guided:source=@{file}", lambda text: [ord(c) for c in text]
    )
    assert strategy == Speculative(InputGuided((233, 13, 10, 10))), (
        "the text as it stands in the file"
    )


def test_a_text_file_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, what in (
        ("empty", "is empty"),
        ("binary", "not UTF-8"),
        ("missing", "No such file"),
        ("", "cannot be"),
    ):
        with pytest.raises(BadConfig, match=f"input-guided:source=@.*{what}.*; give") as caught:
            resolve_method(
                f"input-guided:source=@{tmp_path / name if name else ''}", lambda text: [1]
            )
        assert "\n" not in str(caught.value)
    with pytest.raises(BadConfig, match=r"no tokenizer here.*token ids"):
        resolve_method(f"input-guided:source=@{tmp_path / 'binary'}")
    with pytest.raises(BadConfig, match="input-guided:source='1 x': must be token ids"):
        resolve_method("input-guided:source=1 x")


def test_config_objects_are_specs_too() -> None:
    from foretell.drafters.lookup.ngram import Ngram

    assert resolve_method(Ngram(n=2)) == ("ngram", Speculative(Ngram(n=2)))
    assert resolve_method("ngram:n=2") == ("ngram", Speculative(Ngram(n=2)))
    assert resolve_method("plain")[0] == "plain"


def test_threads_parse_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Python 3.11's parser raises SystemError now and then, as a server's threads saw."""
    parse = ast.parse
    parsing: list[str] = []
    most = 0

    def noted(text: str) -> ast.Module:
        nonlocal most
        parsing.append(text)
        most = max(most, len(parsing))
        time.sleep(0.002)
        module = parse(text)
        parsing.pop()
        return module

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(ast, "parse", noted)
        cards = list(pool.map(card, ["ngram", "suffix"] * 4))
    assert most == 1 and [one.name for one in cards] == ["ngram", "suffix"] * 4


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (
            "method",
            "judge",
            "'judge' is a rule, no method; give it as the rule of a drafter, as in",
        ),
        ("method", "kseq", "draft:rule=kseq"),
        ("method", "snapkv", "is a cache policy, no method; give it as kv='snapkv', --kv snapkv"),
        (
            "method",
            "cfg",
            "is a kind of guidance, no method; give it as guidance='cfg', --guidance cfg",
        ),
        ("method", "momentum", "is a logits processor, no method"),
        ("method", "bleu", "is a reward, no method"),
        ("kv", "best-of", "is a method, no cache policy; give it as method='best-of'"),
        ("rule", "ngram", "'ngram' is a method, no rule"),
        ("method", "jugde", "unknown method 'jugde'"),
    ],
)
def test_a_name_of_another_kind_is_told(kind: str, name: str, words: str) -> None:
    with pytest.raises(UnknownMethod) as error:
        resolve_method(name) if kind == "method" else registry.load_method(name, kind)
    assert words in str(error.value)
