"""Names after dots, by a small server that runs as a process, and by the real one."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.constraints.members import NAME_BYTES, find_member_dots
from foretell.constraints.monitor import MODULE, Monitor
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.errors import BadConfig, Unsupported
from foretell.spec import build_constraint
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests import tiny
from tests.constraints import lsp_server
from tests.constraints.lsp_server import drawn

CODE = "x = one\nx."
OTHER = "y = two\nprint(y"


@pytest.fixture(scope="module")
def lm() -> foretell.LM:
    return tiny.lm()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("code")
    (root / "pkg").mkdir()
    return f"monitor:root={root},file=pkg/a.py,server={sys.executable} -I {lsp_server.__file__}"


def bias() -> dict[int, float]:
    ids = [tiny.tokenizer()(text)["input_ids"] for text in (".", "(", "a", "b", "\n")]
    return dict(zip((one[0] for one in ids), (7.0, 4.0, 3.0, 3.0, 3.0), strict=True))


def strangers(prompt: str, text: str) -> tuple[int, int]:
    """Names after dots in the answer, and how many of these no server has said."""
    whole, start = (prompt + text).encode(), len(prompt.encode())
    names = wrong = 0
    for dot in find_member_dots(whole)[1]:
        end = dot + 1
        while end < len(whole) and whole[end] in NAME_BYTES:
            end += 1
        said = drawn(whole[: dot + 1].decode("utf-8", "replace"))
        if end > start and end < len(whole) and said:
            names += 1
            wrong += whole[dot + 1 : end].decode("utf-8", "replace") not in said
    return names, wrong


def options(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 40, "logit_bias": bias(), "ignore_eos": True, **more}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_names_are_the_servers_whatever_drafts(
    lm: foretell.LM, spec: str, temperature: float
) -> None:
    given = options(constraint=spec, temperature=temperature)
    plain = [lm.generate(prompt, "plain", **given) for prompt in (CODE, OTHER)]
    seen = [strangers(*pair) for pair in zip((CODE, OTHER), (o.text for o in plain), strict=True)]
    assert sum(names for names, _ in seen) > 2 and not any(wrong for _, wrong in seen)
    for method in ("suffix:nodes=4", "draft:length=2,rule=walk,nodes=4"):
        many = lm.generate([CODE, OTHER], method, **given)
        assert [one.tokens for one in many] == [one.tokens for one in plain], method
    counts = plain[0].stats.outside
    assert counts["answered"] and not {*counts} - {"answered", "empty"}
    free = lm.generate(CODE, "plain", **options(temperature=temperature))
    assert strangers(CODE, free.text)[1], "a free text has other names"


def test_samples_and_streams(lm: foretell.LM, spec: str) -> None:
    given = options(constraint=spec, temperature=1.0)
    out = lm.generate(CODE, "plain", n=2, **given)
    assert out.samples[0].tokens != out.samples[1].tokens
    alone = lm.generate(CODE, "plain", **{**given, "seed": 1})
    assert out.samples[1].tokens == alone.tokens
    pieces = list(lm.stream(CODE, "plain", **given))
    assert "".join(piece.text for piece in pieces) == out.text
    assert pieces[-1].stats is not None and pieces[-1].stats.outside == out.stats.outside
    awaited = asyncio.run(lm.agenerate(CODE, "plain", **given))
    assert awaited.tokens == out.tokens


def test_one_process_serves_all_that_ask_for_the_same(lm: foretell.LM, spec: str) -> None:
    servers = [value for key, value in lm._text.kept.items() if key[0] == "monitor"]
    lm.generate(CODE, "plain", constraint=spec, max_new_tokens=1)
    again = [value for key, value in lm._text.kept.items() if key[0] == "monitor"]
    assert len(again) == 1 and again[: len(servers)] == servers


def test_code_may_be_given_beside_the_prompt(lm: foretell.LM, spec: str, tmp_path: Path) -> None:
    """As a file: then the prompt is no code, and the names are those after the file."""
    code = next(f"z{i}." for i in range(99) if drawn(f"z{i}.") == ["a"] or drawn(f"z{i}."))
    (tmp_path / "before.txt").write_text(code)
    spec += f",prefix=@{tmp_path / 'before.txt'}"
    out = lm.generate("Please go on.", "plain", **options(constraint=spec))
    names, wrong = strangers(code, out.text)
    assert names and not wrong


def test_a_dead_server_leaves_the_text_free_and_says_so(lm: foretell.LM, spec: str) -> None:
    prompt = "die = 1\ndie."
    with pytest.warns(UserWarning, match="was given up .it has ended.: names are free"):
        out = lm.generate(prompt, "suffix:nodes=4", **options(constraint=f"{spec},restarts=2"))
    assert set(out.stats.outside) == {"unasked"}
    assert out.tokens == lm.generate(prompt, "plain", **options()).tokens


def test_a_late_answer_leaves_a_name_free(lm: foretell.LM, spec: str) -> None:
    out = lm.generate("late.", "plain", constraint=f"{spec},limit=0.01", max_new_tokens=2)
    assert out.stats.outside["late"] == 1


# --- what is refused


WRONG = {
    "monitor:root=nowhere": "monitor:root='nowhere': must be a folder that exists",
    "monitor:root=": "monitor:root='': must be a folder of code",
    "monitor:file=/x.py": "monitor:file='/x.py': must be a path in root",
    "monitor:file=../x.py": "monitor:file='../x.py': must be a path in root",
    "monitor:file=x.txt": "monitor:file='x.txt': must be a path in root",
    "monitor:file=no/such/x.py,server=cat": "must be in a folder that . has",
    "monitor:limit=0": "monitor:limit=0.0: must be above 0",
    "monitor:restarts=-1": "monitor:restarts=-1: must be between 0 and 1,000",
    "monitor:server=no_such_program --stdio": "must be a command that can be run",
    "monitor:server='": "must be a command that can be run",
    "monitor:rot=x": "unknown field of monitor 'rot'; did you mean root",
    "monitr": "unknown constraint 'monitr'; did you mean monitor",
    "": "constraint='': must be a spec like 'monitor:root=FOLDER'",
}


@pytest.mark.parametrize(("given", "said"), WRONG.items())
def test_what_cannot_be_is_said(lm: foretell.LM, given: str, said: str) -> None:
    with pytest.raises(BadConfig) as raised:
        lm.generate(CODE, "plain", constraint=given, max_new_tokens=2)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_without_the_package_it_is_named(lm: foretell.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'foretell\[monitor\]'"):
        lm.generate(CODE, "plain", constraint="monitor", max_new_tokens=2)


def test_it_needs_a_tokenizer_and_goes_with_no_other_form(lm: foretell.LM, spec: str) -> None:
    bare = foretell.LM(Toy(8))
    with pytest.raises(Unsupported, match="monitor cannot run on toy: it needs a tokenizer"):
        bare.generate([1, 2], "plain", constraint=spec)
    with pytest.raises(BadConfig, match="regex and constraint: a text has one form"):
        lm.generate(CODE, "plain", constraint=spec, regex="a+")
    with pytest.raises(BadConfig, match=r"constraint: only LM\.generate"):
        lm.engine.add(Request([1], Plain(), Sampling(constraint=build_constraint(spec))))


# --- the real server


@pytest.mark.skipif(importlib.util.find_spec(MODULE) is None, reason="needs foretell[monitor]")
def test_the_real_server_knows_the_names_of_a_module(lm: foretell.LM, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "gear.py").write_text(
        "class Gadget:\n    zorvex: int = 1\n    def zipple(self) -> 'Gadget': return self\n"
    )
    prompt = "from .gear import Gadget\n\ng = Gadget()\nprint(g.z"
    monitor = Monitor(root=str(tmp_path), file="pkg/use.py", limit=30.0)
    letters = {tiny.tokenizer()(one)["input_ids"][0]: -50.0 for one in ("_",)}
    out = lm.generate(prompt, "plain", constraint=monitor, logit_bias=letters, max_new_tokens=12)
    assert out.stats.outside["answered"] and out.text.startswith(("orvex", "ipple"))
