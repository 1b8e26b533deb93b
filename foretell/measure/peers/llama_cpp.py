"""llama.cpp through llama-cpp-python: plain, and with its prompt lookup drafting 2 or 10 tokens.

10 is its default, 2 what its documentation advises for a CPU. The converter is that of its source
distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretell.errors import Unsupported
from foretell.measure.peers import Peer, Place, Run
from foretell.measure.peers._conversion import converted
from foretell.measure.peers._environment import environment
from foretell.measure.peers._gguf import convert, prepare
from foretell.measure.peers._worker import Worker

__all__ = ["contenders", "convert", "prepare", "start"]  # what a peer's file has

NAME = "llama.cpp"
FORMATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int8": "Q8_0"}
LOOKUPS = (2, 10)


def contenders(place: Place) -> list[Peer]:
    where = environment(NAME, ["llama_cpp"], place)
    if place.model.endswith(".gguf"):
        file, kind, name = Path(place.model).expanduser(), "the file as it is", NAME
    else:
        if place.dtype not in FORMATS:
            raise Unsupported.missing(
                NAME, place.dtype, f"one of {', '.join(FORMATS)}", "choose another --dtype"
            )
        if not (sources := where.folder / "sources").is_dir():
            cure = f"`python -m foretell.measure.peers setup {NAME}` fetches it"
            raise Unsupported.missing(NAME, "weights in safetensors", "llama.cpp's converter", cure)
        name = f"{NAME} {(kind := FORMATS[place.dtype])}"
        file = converted(
            where, place.model, kind, {"sources": str(sources), "type": kind.lower()}, here=True
        )
    about = (
        f"llama-cpp-python {where.version('llama-cpp-python')}, {kind}, "
        f"n_threads=n_threads_batch={place.threads}"
    )
    common = {"file": str(file), "threads": place.threads, "eos": place.eos}
    lookup = f"{about}, LlamaPromptLookupDecoding(num_pred_tokens=%d)"
    plain = Worker(name, f"{about}, Llama.generate", where, common | {"lookup": 0})
    more = (
        Worker(f"{name} prompt lookup {n}", lookup % n, where, common | {"lookup": n})
        for n in LOOKUPS
    )
    return [plain, *more]


def start(options: dict[str, Any]) -> Callable[..., Run]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    class Counted(Llama):
        """Notes its forwards, so that tokens of one step are told from those of the next."""

        steps = 0

        def eval(self, tokens: Any) -> None:
            self.steps += 1
            super().eval(tokens)

    lookup, threads, opened = options["lookup"], options["threads"], list[Counted]()

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        room = len(ids) + max_new_tokens + lookup
        if (
            not opened or opened[0].n_ctx() < room
        ):  # its context has a fixed size, which is paid for in memory
            draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
            how = {
                "n_ctx": max(2048, 2 * room),
                "n_threads": threads,
                "n_threads_batch": threads,
                "verbose": False,
            }
            # Told to keep logits, it has room for those of a whole context; the lookup needs it
            # behind 512 tokens.
            opened[:] = [Counted(options["file"], draft_model=draft, logits_all=lookup > 0, **how)]
        llama = opened[0]
        llama.reset()  # it would not read again what the prompts before this one began with
        llama.set_seed(seed)
        found, last = Run([], [], []), -1
        began = time.perf_counter()
        for token in llama.generate(ids, top_k=0, top_p=1.0, min_p=0.0, temp=temperature):
            now = time.perf_counter() - began
            if llama.steps != last:
                found.times.append(now)
                found.counts.append(0)
            found.times[-1], found.counts[-1], last = now, found.counts[-1] + 1, llama.steps
            found.tokens.append(token)
            if token in options["eos"] or len(found.tokens) == max_new_tokens:
                break
        return found

    return run
