"""The process in which foretell is measured: lines of JSON go in and come out, as with peers.

Each request has one of the names of `Side.answers` for its first key.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import foretell
from foretell import bench
from foretell.bench.contenders import Method
from foretell.bench.hardware import weight_bytes
from foretell.bench.turns import one_line_reason

KEYS = ("tokens", "times", "counts")  # of an answer to a generation


class Side:
    """A loaded model, and an engine for each of its methods."""

    def __init__(self, model: str, dtype: str, threads: int):
        torch.set_num_threads(threads)
        began = time.perf_counter()
        self.lm = foretell.load(model, dtype=dtype)
        self.load_s = time.perf_counter() - began
        self.methods: dict[str, Method] = {}
        self.answers: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self.describe,
            "encode": self.encode,
            "first": self.first_token,
            "forget": self.forget,
            "steps": self.steps,
            "method": self.generate,
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.answers[next(iter(request))](**request)

    def describe(self, open: bool) -> dict[str, Any]:
        """What the model is. `weights`: bytes that a step reads; None where that is not known."""
        target = self.lm.models["target"]
        return {
            "opened": self.load_s,
            "path": str(self.lm.path) if self.lm.path else None,
            "eos": list(self.lm.engine.eos),
            "executor": getattr(getattr(target, "backend", None), "name", "torch"),
            "weights": weight_bytes(target),
        }

    def encode(self, encode: list[Any]) -> dict[str, Any]:
        return {"ids": [bench.prompt_ids(self.lm, prompt) for prompt in encode]}

    def first_token(self, first: list[int]) -> dict[str, Any]:
        """Seconds until a user of `stream` has the first token."""
        began = time.perf_counter()
        pieces = self.lm.stream(first, "auto", max_new_tokens=2)
        next(pieces)
        seconds = time.perf_counter() - began
        for _ in pieces:
            pass
        return {"seconds": seconds}

    def forget(self, forget: bool) -> dict[str, Any]:
        """Everything learnt from earlier texts."""
        for method in self.methods.values():
            method.forget()
        return {}

    def steps(self, steps: bool) -> dict[str, Any]:
        """Seconds of a step by its number of rows, after a short text."""
        behind = self.lm.measure(fresh=True)["seconds"]
        return {"seconds": {str(rows): s for rows, s in behind[min(behind)].items()}}

    def generate(self, method: str, ids: list[int], **how: Any) -> dict[str, Any]:
        if method not in self.methods:
            self.methods[method] = Method(self.lm, method)
        (run,) = self.methods[method].run([ids], **how)
        return {key: getattr(run, key) for key in KEYS}


def main(options: str) -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # so that what a library prints is no answer
        side = None
        for line in sys.stdin:
            try:
                side = side or Side(**json.loads(options))
                answer = side.answer(json.loads(line))
            except Exception as error:  # that it did not work is the answer
                answer = {"error": one_line_reason(error)}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
