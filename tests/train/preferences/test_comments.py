"""train/preferences/comments.py: comments are taken out of programs, and nothing else is."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import BadConfig
from foretell.train.preferences.comments import (
    UNREADABLE,
    documented_functions,
    read_commented,
    strip_answer,
    strip_comments,
)

REMARK = st.sampled_from(["#", "# why", '# "quoted', "#: it's", "# ''' text '''", "# größer #2"])
SIMPLE = st.sampled_from(
    [
        "a = '# no comment'",
        'b = """# nor this\n  # and this \n"""',
        "c = rb'\\\\#' + b'\\'#'",
        "d = f'{a!r:#>{8}}#'",
        "e = [1,{}\n    2,{}\n]",
        "g = 1 + \\\n  2",
        "return a",
        "h = {'#': 3}; i = '\\'# '",
    ]
)


@st.composite
def lines(draw: st.DrawFn, indent: str, depth: int) -> list[str]:
    """A block's lines, with comments wherever there may be some."""

    def remark(before: str = "  ") -> str:
        return draw(st.one_of(st.just(""), REMARK.map(lambda text: before + text)))

    found = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            margin = draw(st.sampled_from(["", " ", indent, indent + "    "]))
            found.append(margin + draw(REMARK))
        if draw(st.booleans()):
            found.append(draw(st.sampled_from(["", "   "])))
        if depth and draw(st.booleans()):
            opening = draw(st.sampled_from(["if a:", "def f(x):", "for x in '#':", "class A:"]))
            inner = draw(lines(indent + draw(st.sampled_from(["    ", "\t"])), depth - 1))
            found += [indent + opening + remark(), *inner]
        else:
            simple = draw(SIMPLE)
            while "{}" in simple and "f'" not in simple:
                simple = simple.replace("{}", remark(), 1)
            found.append(indent + simple + remark(draw(st.sampled_from(["", "  ", "\t"]))))
    return found


def tokens(code: str) -> list[tuple[int, str]]:
    """All of them but comments and the ends of lines that have nothing else."""
    kinds = (tokenize.COMMENT, tokenize.NL)
    found = tokenize.generate_tokens(io.StringIO(code).readline)
    return [(token.type, token.string) for token in found if token.type not in kinds]


def check(code: str) -> None:
    plain = strip_comments(code)
    assert tokens(plain) == tokens(code)
    kinds = {token.type for token in tokenize.generate_tokens(io.StringIO(plain).readline)}
    assert tokenize.COMMENT not in kinds
    assert strip_comments(plain) == plain


@settings(deadline=None, max_examples=200)
@given(lines("", 2).map("\n".join), st.sampled_from(["", "\n", "\n# the end", "\n\n\n"]))
def test_the_other_tokens_of_a_program_stay(code: str, end: str) -> None:
    check(code + end)
    assert ast.dump(ast.parse(strip_comments(code + end))) == ast.dump(ast.parse(code + end))


def test_cutting_lines_at_their_first_sign_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(code: str) -> str:
        return "\n".join(line.split("#")[0] for line in code.split("\n"))

    monkeypatch.setitem(globals(), "strip_comments", cut)
    with pytest.raises((AssertionError, *UNREADABLE)):
        check("a = '# no comment'  # one\nb = 2")


def test_lines_with_a_comment_alone_go_and_others_are_cut() -> None:
    body = "    # first\n    a = 1  # one\n\n    if a:\n        # why\n        return '#'\n"
    assert strip_comments(body) == "    a = 1\n\n    if a:\n        return '#'\n"
    with pytest.raises(UNREADABLE):
        strip_comments("a = (1,  # open")


def test_of_an_answer_the_fenced_code_counts() -> None:
    text = "# Title\n\n```python\na = 1  # one\n```\nand # this\n```\n# gone\nb\n```\n"
    assert strip_answer(text) == "# Title\n\n```python\na = 1\n```\nand # this\n```\nb\n```\n"
    assert strip_answer("a = 1  # one") == "a = 1"


FILE = '''
class Box:
    """Holds a thing."""

    def put(self, thing):
        """Puts it in."""
        # There is room for one.
        self.thing = thing

    def bare(self):
        return self.thing


async def wait(box):
    """Waits."""
    return box


def short(): "Says."; return 1


def only():
    """Does nothing."""
'''


def test_functions_with_docstrings_are_prompts_and_answers() -> None:
    put, wait = documented_functions(FILE)
    assert put == (
        'def put(self, thing):\n    """Puts it in."""',
        "\n    # There is room for one.\n    self.thing = thing\n",
    )
    assert wait == ('async def wait(box):\n    """Waits."""', "\n    return box\n")
    assert not list(documented_functions("def (")) and not list(documented_functions("a = '\0'"))


def test_what_is_in_rows_and_folders_is_read(tmp_path: Path) -> None:
    (tmp_path / "box.py").write_text(FILE)
    (tmp_path / "notes.md").write_text(FILE)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Add.", "answer": "a + b  # the sum"}\n')
    assert [prompt for prompt, _ in read_commented([str(rows)])] == ["Add."]
    assert len(list(read_commented([str(tmp_path / "box.py")]))) == 2
    rows.write_text('{"prompt": "Add.", "answer": " "}\n')
    with pytest.raises(BadConfig, match="row 1: `answer` must be code"):
        list(read_commented([str(rows)]))
    with pytest.raises(BadConfig, match="no such file or folder"):
        list(read_commented([str(tmp_path / "gone")]))
    rows.unlink()
    assert len(list(read_commented([str(tmp_path)]))) == 2
