"""Invented modules: code that runs, names that are its own, and the judge of names."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from foretell.bench.invented import invent_modules, judge_names, write_modules
from foretell.constraints.completing import Documents
from foretell.constraints.language_server import LanguageServer
from tests.constraints import lsp_server
from tests.constraints.lsp_server import drawn


def test_modules_are_whole_and_prompts_use_them(tmp_path: Path) -> None:
    modules = invent_modules(12, seed=3)
    assert modules == invent_modules(12, seed=3) and modules != invent_modules(12, seed=4)
    write_modules(modules, tmp_path)
    for module in modules:
        path = tmp_path / "kit" / f"mod_{module.number}.py"
        space: dict[str, type] = {}
        exec(compile(path.read_text("utf-8"), str(path), "exec"), space)
        part, whole = (
            node.name for node in ast.parse(module.code).body if isinstance(node, ast.ClassDef)
        )
        made = space[whole](1.5, ["a"])
        assert len({*vars(made), *vars(space[part](1, "b"))}) == 5
        assert len(module.prompts) == 3
        for prompt in module.prompts:
            assert prompt.startswith(f"from kit.mod_{module.number} import {whole}, {part}\n")
            assert "{" not in prompt.replace("{}", "")


def test_names_behind_dots_of_whole_lines_are_judged(tmp_path: Path) -> None:
    server = LanguageServer([sys.executable, "-I", lsp_server.__file__], tmp_path, 20.0, 0)
    judge = Documents(server, tmp_path / "use.py")
    try:
        found = []
        for number in range(12):
            prompt = f"x{number}.skipped = y{number}."
            text = "abc + z.b\nw.cc.ab(1)\n'no. name' # q.a\nu.\nv.ba\nlast.a"
            for name, exists in judge_names(prompt, text, judge):
                found.append((number, name, exists))
            whole = prompt + text
            for own, name in ((f"y{number}.", "abc"), ("z.", "b"), ("w.cc.", "ab"), ("v.", "ba")):
                said = drawn(whole[: whole.index(own) + len(own)])
                assert ((number, name, name in said) in found) == bool(said), own
        names = {name for _, name, _ in found}
        assert names == {"abc", "b", "cc", "ab", "ba"}, "of whole lines of code alone"
        assert {exists for _, _, exists in found} == {True, False}
    finally:
        server.close()
