"""The program of a process that tries forms: whether one can be compiled, and how its texts end.

    python -m foretell.constraints.grammar_worker

It reads questions from its standard input and answers on its standard output, both lines of JSON.
A form may take it any time and memory, or break it, as one does that is nested too deeply; whoever
asks ends it then: see constraints.grammar_trials.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from foretell.constraints.compiling import build_matcher, compiler_form
from foretell.constraints.endings import Alphabet, Search
from foretell.constraints.grammar_text import make_lazy
from foretell.errors import BadConfig

MEMORY = 2**30  # bytes that the process may have
STACK = 2**20  # of the thread that compiles, less than others have where the form is used


def try_form(question: dict[str, Any]) -> dict[str, Any]:
    """Tries a form. The answer says why it is `refused`; or it has the `source` in llguidance's
    words, an `ending` of the empty text or None, and what ends its `parts`, all three for
    constraints.endings, and the `seconds` that compiling took.
    """
    name, source = question["name"], question["source"]
    special_names = {int(token): text for token, text in question["specials"].items()}
    alphabet = Alphabet(question["vocab"], special_names, question["end"])

    def is_dead(grammar: str) -> bool:
        _, start, ending = Search.begin_search(alphabet, "grammar", grammar)
        return not start.is_error() and ending is None

    try:
        compiler_text = compiler_form(name, source)
        if name == "grammar":
            compiler_text = make_lazy(compiler_text, is_dead)
        started_at = time.perf_counter()
        start_matcher = build_matcher(name, source, alphabet.tokenizer, compiler_text)
        start_matcher.compute_bitmask()
        seconds = time.perf_counter() - started_at
    except BadConfig as error:
        return {"refused": str(error)}
    except RecursionError:
        return {"refused": f"{name}: nested too deeply; simplify it"}
    error_text = start_matcher.get_error()
    if error_text and not error_text.startswith("NoExtension"):  # no text at all: told elsewhere
        return {"refused": f"{name}: {error_text.splitlines()[0]}; simplify it"}
    ending_search, _, ending = Search.begin_search(alphabet, name, compiler_text)
    return {
        "source": compiler_text,
        "ending": ending,
        "parts": ending_search.parts,
        "seconds": seconds,
    }


def answer_lines() -> None:
    """Answers questions until the input ends."""
    with suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    for question_line in sys.stdin.buffer:
        answer: dict[str, Any] = {}

        def work(line: bytes = question_line, answer: dict[str, Any] = answer) -> None:
            question = json.loads(line)
            try:
                answer |= try_form(question)
            except MemoryError:
                refusal = "it takes too much memory to compile; simplify it"
                answer["refused"] = f"{question['name']}: {refusal}"

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    answer_lines()
