"""CTranslate2, for the architectures that it takes: plain decoding, which is all it has.

Its own converter reads the model. On a CPU it has no 16 bits: what is measured beside bfloat16 is
float32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretell.bench.peers import Peer, Place, Run
from foretell.bench.peers._conversion import converted
from foretell.bench.peers._environment import environment
from foretell.bench.peers._worker import Worker
from foretell.errors import Unsupported

NAME = "ctranslate2"
FORMATS = {"bfloat16": "float32", "float16": "float32", "float32": "float32", "int8": "int8"}


def contenders(place: Place) -> list[Peer]:
    where = environment(NAME, [NAME], place)
    if place.dtype not in FORMATS:
        raise Unsupported.missing(
            NAME, place.dtype, f"one of {', '.join(FORMATS)}", "choose another --dtype"
        )
    kind = FORMATS[place.dtype]
    options = {
        "model": str(converted(where, place.model, kind, {"kind": kind}, here=True)),
        "kind": kind,
        "threads": place.threads,
        "eos": place.eos,
    }
    about = (
        f"ctranslate2 {where.version('ctranslate2')}, Generator.generate_batch, "
        f"compute_type={kind}, intra_threads={place.threads}"
    )
    return [Worker(f"{NAME} {kind}", about, where, options)]


def start(options: dict[str, Any]) -> Callable[..., Run]:
    import ctranslate2

    words: list[str] = json.loads((Path(options["model"]) / "vocabulary.json").read_text("utf-8"))
    generator = ctranslate2.Generator(
        options["model"],
        compute_type=options["kind"],
        inter_threads=1,
        intra_threads=options["threads"],
    )

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        found = Run([], [], [])
        how = (
            {"sampling_topk": 0, "sampling_temperature": temperature}
            if temperature
            else {"sampling_topk": 1}
        )
        ctranslate2.set_random_seed(seed)
        prompt = [words[i] for i in ids]

        def note(step: Any) -> bool:
            found.times.append(time.perf_counter() - began)
            found.counts.append(1)
            found.tokens.append(step.token_id)
            return False

        began = time.perf_counter()
        generator.generate_batch(
            [prompt],
            max_length=max_new_tokens,
            end_token=options["eos"] or None,
            include_prompt_in_result=False,
            callback=note,
            **how,
        )
        return found

    return run


def convert(options: dict[str, Any]) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(options["source"]).convert(options["out"], quantization=options["kind"])
