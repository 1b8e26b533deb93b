"""The process after lane=process: makes one model by a recipe and answers what is asked of it.

Run as `python -m foretell.loading.model_worker` by engine/remote.py, which says what goes over the
pipe. Standard input brings asks, standard output takes answers; whatever else prints goes to
standard error. It ends when standard input does.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import torch

from foretell.cache.cache import Cache
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.engine.remote import receive_message, send_message
from foretell.errors import first_message_line

CHUNK = 512  # tokens of a long text in a forward


def find_maker(recipe_name: str) -> Callable[..., Model]:
    """The function of this package that a recipe names, `foretell.module:function`."""
    module, _, function = recipe_name.partition(":")
    if not module.startswith("foretell."):
        raise ValueError(f"{recipe_name!r} is no function of this package")
    make_model: Callable[..., Model] = getattr(importlib.import_module(module), function)
    return make_model


def load_target(**arguments: Any) -> Model:
    """Loads the target model that foretell.load makes of these arguments."""
    from foretell.loading.load import (
        load,  # not of the package itself, which makes other things too
    )

    return load(**arguments).models["target"]


class Answers:
    """The model, and the rows and texts of every seat."""

    def __init__(self, model: Model):
        self.model = model
        self.caches: dict[int, Cache] = {}
        self.texts: dict[int, list[int]] = {}

    @torch.inference_mode()
    def answer(self, message: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The rows that an ask wants, as they are sent back."""
        for seat in message["drop"]:
            self.texts.pop(seat, None)
            if seat in self.caches:
                self.caches.pop(seat).drop()
        seat = message["seat"]
        cache = self.caches.get(seat)
        if cache is None:
            cache = self.caches[seat] = self.model.cache()
        tokens = [*self.texts.get(seat, [])[: message["same"]], *message["tokens"]]
        self.texts[seat] = tokens
        layers = None if message["layers"] is None else tuple(message["layers"])
        ask = Ask(tree_of(*message["tree"]), rows=message["rows"], layers=layers)
        is_complete = False
        while not is_complete:
            job, is_complete = cache.prepare(ask, tokens, CHUNK)
            reply = self.model.forward([job])[0]
        rows = reply.logits.cpu().contiguous().numpy()
        array_header = {"dtype": rows.dtype.str, "shape": rows.shape}
        return {**array_header, "nodes": reply.nodes, "new": reply.new}, rows.tobytes()


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    """The tree of these nodes: what a forward reads of it."""
    tree = TokenTree(tokens[0])
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        tree.add(parent, token)
    return tree


def serve_asks(asks: IO[bytes], answers: IO[bytes]) -> None:
    """Answers until there are no more asks."""
    first_message = receive_message(asks)
    if first_message is None:
        return
    recipe, _ = first_message
    try:
        torch.set_num_threads(recipe["threads"])
        model = Answers(find_maker(recipe["make"])(**recipe["arguments"]))
    except Exception as error:  # loading may raise nearly anything
        send_message(
            answers,
            {"error": f"cannot make it: {type(error).__name__}: {first_message_line(error)}"},
        )
        return
    send_message(answers, {"name": model.model.name})
    while (request := receive_message(asks)) is not None:
        try:
            message, payload = model.answer(request[0])
        except Exception as error:  # the other side is to know
            message, payload = (
                {"error": f"{type(error).__name__}: {first_message_line(error)}"},
                b"",
            )
        send_message(answers, message, payload)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks decides when it ends
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(BrokenPipeError):  # who asked is gone
        serve_asks(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
    os._exit(0)  # at once: there is nothing to tidy up, and somebody waits
