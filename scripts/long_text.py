"""What texts far beyond a model's context take under cache policies: `python scripts/long_text.py`.

    python scripts/long_text.py --tokens 8000,100000 --depths 0.3,0.7 --threads 2 \\
        --kv "infllm:dir=/tmp" --kv "streaming-llm:window=4096" --json runs/long_text.json

A pass key is planted in a text at each depth and asked for after it. Of every answer it notes
whether the key is in it, the seconds of the prompt and of a step (the median), the most memory that
lay in RAM meanwhile (mapped files counted, /proc/self/statm, so Linux only), and the most that lay
in the folder of a policy's `dir`. Answers that --json holds already are not asked for again. Speed
means something only where nothing else runs. Nothing here fails by a number: it is for reading.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import foretell
from foretell.longbench import texts
from foretell.ops.files import write_text

KEY = "The pass key of the silver harp is"
QUESTION = f"\n\nQuestion: What is the pass key of the silver harp?\nAnswer: {KEY}"
BETWEEN = 0.05  # seconds between two looks at memory


def resident() -> int:
    """Bytes of this process that lie in memory now."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def on_disk(folder: str) -> int:
    """Bytes of the files in a folder."""
    total = 0
    for path in Path(folder).rglob("*") if folder else ():
        with contextlib.suppress(OSError):  # removed meanwhile
            total += path.stat().st_blocks * 512
    return total


@dataclass
class Most:
    """Bytes: the most that were seen."""

    resident: int = 0
    disk: int = 0


@contextmanager
def watching(folder: str) -> Iterator[Most]:
    """Looks at memory and at a folder until the block ends."""
    most, done, before = Most(), threading.Event(), on_disk(folder)

    def look() -> None:
        while not done.wait(BETWEEN):
            most.resident = max(most.resident, resident())
            most.disk = max(most.disk, on_disk(folder) - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def prompt_of(lm: foretell.LM, tokens: int, depth: float, seed: int) -> tuple[list[int], str]:
    """A text of at most so many tokens with its question, and the key."""
    draw = random.Random(f"{seed} {tokens} {depth}")
    value = str(draw.randrange(10_000, 100_000))
    needle, ask = f"{KEY} {value}.", lm.encode(QUESTION, special=False)

    def counted(text: str) -> int:
        return len(lm.encode(text, special=False))

    room = tokens - len(ask) - counted(f" {needle}") - 8
    sentences = texts.fill_sentences(texts.draw_sentences(draw), room, counted)
    context = lm.encode(texts.plant_needles(sentences, [(depth, needle)]))
    return [*context, *ask], value


def answered(lm: foretell.LM, kv: str, prompt: list[int], value: str, new: int) -> dict[str, Any]:
    """What one answer took."""
    parts = dict(part.partition("=")[::2] for part in kv.partition(":")[2].split(","))
    times, said = [], []
    begun = time.perf_counter()
    with watching(parts.get("dir", "")) as most:
        asked = None if kv == "full" else kv
        for piece in lm.stream(prompt, "plain", max_new_tokens=new, kv=asked):
            times += [time.perf_counter()] * len(piece.tokens)
            said += piece.tokens
    steps = [after - before for before, after in itertools.pairwise(times)]
    return {
        "kv": kv,
        "prompt": len(prompt),
        "answer": lm.decode(said),
        "found": value in lm.decode(said),
        "first_s": times[0] - begun,
        "step_s": statistics.median(steps) if steps else None,
        "resident": most.resident,
        "disk": most.disk,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--tokens", default="8000,30000", help="of texts, with commas")
    parser.add_argument("--depths", default="0.5", help="of the pass key, 0 to 1, with commas")
    parser.add_argument("--kv", action="append", help="a cache policy, or full; repeatable")
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lm = foretell.load(options.model, dtype=options.dtype)
    rows: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text("utf-8"))["rows"]
    print(f"{'tokens':>8} {'depth':>5} {'found':>5} {'tokens/s':>8} {'ms a step':>9} "
          f"{'MB':>6} {'MB disk':>7}  policy")  # fmt: skip
    for tokens in map(int, options.tokens.split(",")):
        for depth in map(float, options.depths.split(",")):
            prompt, value = prompt_of(lm, tokens, depth, options.seed)
            for kv in options.kv or ("infllm", "streaming-llm:window=4096"):
                key = {"tokens": tokens, "depth": depth, "seed": options.seed, "kv": kv}
                row = next((row for row in rows if key.items() <= row.items()), None)
                if row is None:
                    row = key | answered(lm, kv, prompt, value, options.new)
                    rows.append(row)
                speed = row["prompt"] / row["first_s"]
                step = (row["step_s"] or 0) * 1e3
                print(f"{tokens:8,} {depth:5.2f} {row['found']!s:>5} {speed:8.0f} {step:9.1f} "
                      f"{row['resident'] / 1e6:6.0f} {row['disk'] / 1e6:7.0f}  {kv}",
                      flush=True)  # fmt: skip
                if options.json is not None:
                    about = {name: getattr(options, name) for name in ("model", "dtype", "threads")}
                    text = json.dumps(about | {"rows": rows}, indent=1)
                    write_text(options.json, text + "\n")


if __name__ == "__main__":
    main()
