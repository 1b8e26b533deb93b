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

from foretell.constraints.compiling import compilable, matcher_of
from foretell.constraints.endings import Alphabet, Search
from foretell.constraints.grammar_text import lazily
from foretell.errors import BadConfig

MEMORY = 2**30  # bytes that the process may have
STACK = 2**20  # of the thread that compiles, less than others have where the form is used


def tried(question: dict[str, Any]) -> dict[str, Any]:
    """The answer: why the form is `refused`, or the `source` of it in llguidance's words, an
    `ending` of the empty text or None, and what ends its `parts`, all three for
    constraints.endings; the `seconds` that compiling took.
    """
    name, source = question["name"], question["source"]
    specials = {int(token): text for token, text in question["specials"].items()}
    alphabet = Alphabet(question["vocab"], specials, question["end"])

    def dead(grammar: str) -> bool:
        _, start, ending = Search.begin(alphabet, "grammar", grammar)
        return not start.is_error() and ending is None

    try:
        words = compilable(name, source)
        if name == "grammar":
            words = lazily(words, dead)
        began = time.perf_counter()
        start = matcher_of(name, source, alphabet.tokenizer, words)
        start.compute_bitmask()
        seconds = time.perf_counter() - began
    except BadConfig as error:
        return {"refused": str(error)}
    except RecursionError:
        return {"refused": f"{name}: nested too deeply; simplify it"}
    said = start.get_error()
    if said and not said.startswith("NoExtension"):  # no text at all: told elsewhere
        return {"refused": f"{name}: {said.splitlines()[0]}; simplify it"}
    search, _, ending = Search.begin(alphabet, name, words)
    return {"source": words, "ending": ending, "parts": search.parts, "seconds": seconds}


def main() -> None:
    """Answers until its input ends."""
    with suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    for line in sys.stdin.buffer:
        answer: dict[str, Any] = {}

        def work(line: bytes = line, answer: dict[str, Any] = answer) -> None:
            question = json.loads(line)
            try:
                answer |= tried(question)
            except MemoryError:
                said = "it takes too much memory to compile; simplify it"
                answer["refused"] = f"{question['name']}: {said}"

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
