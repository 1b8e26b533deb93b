"""Commented code, and the same without its comments: what `foretell train mango` contrasts.

Comments are found by Python's own tokenizer, so what looks like one inside a string stays. A line
with nothing but a comment goes as a whole; every other token of the program stays as it was.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from foretell.bench.prompts import Prompt, read_prompts
from foretell.errors import BadConfig
from foretell.train.corpus import read_documents

FENCED = re.compile(
    r"(^[ \t]*```(?:python|py)?[ \t]*\n)(.*?)(^[ \t]*```[ \t]*$)", re.S | re.M | re.I
)
UNREADABLE = (tokenize.TokenError, SyntaxError)  # what Python's tokenizer says of what is no code
Commented = tuple[Prompt, str]  # a prompt, and its answer in commented code


def strip_comments(code: str) -> str:
    """The program without its comments. Raises TokenError or SyntaxError for what is no Python.

    It may be a part of a program that begins indented, as the body of a function does.
    """
    lines = code.split("\n")
    removed_lines = set()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, start = token.start
            line = lines[row - 1]
            code_part = line[:start].rstrip(" \t\f")
            lines[row - 1] = code_part + line[token.end[1] :]
            if not lines[row - 1].strip() and row < len(lines):  # the last ends the one before it
                removed_lines.add(row - 1)
    return "\n".join(line for place, line in enumerate(lines) if place not in removed_lines)


def strip_answer(answer: str) -> str:
    """An answer without the comments of its code: that in fences, or the whole where there are
    none. Raises as `uncommented`.
    """
    if "```" not in answer:
        return strip_comments(answer)
    return FENCED.sub(
        lambda fence_match: fence_match[1] + strip_comments(fence_match[2]) + fence_match[3], answer
    )


def documented_functions(source: str) -> Iterator[Commented]:
    """The functions of a Python file that have a docstring: up to its end they are a prompt, and
    the rest is the answer. Methods lose their indentation.

    A file that is no Python has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what the file says
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a null byte is a ValueError
        return
    lines = source.split("\n")
    remaining_nodes: list[ast.stmt] = tree.body[::-1]
    while remaining_nodes:
        node = remaining_nodes.pop()
        if isinstance(node, ast.ClassDef):
            remaining_nodes += node.body[::-1]
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring_node = node.body[0]
        if ast.get_docstring(node) is None or docstring_node.end_lineno == node.body[1].lineno:
            continue
        indentation = " " * node.col_offset
        function_lines = lines[node.lineno - 1 : node.end_lineno]
        if any(line.strip() and not line.startswith(indentation) for line in function_lines):
            continue
        unindented = [line[len(indentation) :] for line in function_lines]
        head_lines = (docstring_node.end_lineno or 0) - node.lineno + 1
        yield "\n".join(unindented[:head_lines]), "\n" + "\n".join(unindented[head_lines:]) + "\n"


def read_commented(sources: list[str]) -> Iterator[Commented]:
    """Yields commented code of sources: rows of a .jsonl file with `answer` beside their prompt, or
    the functions of Python's own library (`stdlib`), of a folder or of a file. Raises BadConfig.
    """
    for source in sources:
        path = Path(source)
        if source == "stdlib":
            for _, text in read_documents(source):
                yield from documented_functions(text)
        elif not path.exists():
            cure = "give stdlib, a folder, a file of Python or a .jsonl file"
            raise BadConfig(f"--code {source}: no such file or folder; {cure}")
        elif path.suffix == ".jsonl":
            yield from _read_rows(path)
        else:
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                yield from documented_functions(file.read_text("utf-8", errors="replace"))


def _read_rows(path: Path) -> Iterator[Commented]:
    prompts = read_prompts(path)
    lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=True), 1):
        answer = json.loads(line).get("answer")
        if not isinstance(answer, str) or not answer.strip():
            raise BadConfig(f"{path}, row {number}: `answer` must be code with comments")
        yield prompt, answer
