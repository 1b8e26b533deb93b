"""Prompt files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.bench.prompts import read_prompts
from foretell.errors import BadConfig


def test_prompt_files_may_have_any_of_the_fields(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "a", "text": "x"},
        {"turns": ["b", "c"]},
        {"messages": messages},
        {"question": "d"},
        {"text": "e"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    b, d = ([{"role": "user", "content": text}] for text in "bd")
    assert read_prompts(path) == ["a", b, messages, d, "e"]
    path.write_text(json.dumps({"prompt": "two\u2028lines"}, ensure_ascii=False))
    assert read_prompts(path) == ["two\u2028lines"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: needs one of the fields prompt, turns"),
        ('{"answer": 1}', "'answer'"),
        ('{"prompt": 5}', "`prompt` must be a text"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": "half \\ud83d"}', "half a character, '\\ud83d'"),
        ("[" * 100_000, "nested too deeply"),
        ('{"turns": []}', "`turns` must be a list of texts"),
        ('{"messages": [{"role": "user"}]}', "`role` and `content`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(BadConfig, match="line 2") as raised:
        read_prompts(path)
    assert said in str(raised.value)


def test_an_unreadable_prompt_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b'{"prompt": "a"}\n\xff\xfe\x00')
    for name, said in (
        ("empty", "no prompts"),
        ("binary", "line 2: not UTF-8"),
        ("none", "No such file"),
        (".", "directory"),
    ):
        with pytest.raises(BadConfig, match=said):
            read_prompts(tmp_path / name)
