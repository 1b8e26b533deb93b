"""The process that a peer runs in, started as a script: tasks of the peer's file.

It imports that file and no other part of foretell that needs packages, for its environment has
other ones. `start` answers requests, lines of JSON, until there are no more: `{"open": true}` loads
the model and says how long that took, any other one is a generation, before which the model is
loaded too. `convert` writes a file or folder. What a library prints is dropped: there may be
prompts in it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2]
KEYS = ("tokens", "times", "counts")  # of an answer


def main(stem: str, task: str, options_text: str) -> None:
    # Not the real packages, which need others that may be missing here.
    for name, folder in (("foretell", PACKAGE), ("foretell.bench", PACKAGE / "bench")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    peer_module = importlib.import_module(f"foretell.bench.peers.{stem}")
    options = json.loads(options_text)
    if task == "convert":
        sys.path += options["packages"]
        peer_module.convert(options)
    else:
        _answer_requests(peer_module, options)


def _answer_requests(peer_module: Any, options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what a library prints is no answer
    run = None
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            request = json.loads(line)
            start_time = time.perf_counter()
            run = run or peer_module.start(options)
            if "open" in request:
                answer = {"opened": time.perf_counter() - start_time}
            else:
                result = run(**request)
                answer = {key: getattr(result, key) for key in KEYS}
        except Exception as error:  # another library may raise anything; that it did is the answer
            failure_reason = " ".join(f"{type(error).__name__}: {error}".split())
            answer = {"error": failure_reason[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
