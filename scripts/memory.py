"""How much memory a process takes while it answers one request after the other: `python
scripts/memory.py`.

    python scripts/memory.py --model demo --method auto --requests 1000 --threads 2 --json
    runs/memory.json

The prompts are those that ship with the package, over and over. After every `--every` requests it
notes the resident bytes of the process (/proc/self/statm, so Linux only), Python's tracked objects,
and the bytes of what drafters learnt. At the end it collects garbage and, where the C library can,
gives free memory back, so that what is kept and what is merely not returned can be told apart.
Nothing here fails by a number: it is for reading.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import foretell
from foretell import bench
from foretell.engine import saved_stores as stores


def resident() -> int:
    """Bytes of this process that lie in memory now."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def note(lm: foretell.LM, done: int) -> dict[str, int]:
    """The numbers after `done` requests."""
    learnt = sum(store.nbytes for *_, store in stores.iterate_stores(lm.engine))
    return {
        "requests": done,
        "resident": resident(),
        "objects": len(gc.get_objects()),
        "stores": learnt,
    }


def grow(
    lm: foretell.LM,
    method: str,
    requests: int,
    every: int,
    max_new_tokens: int,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Answers so many requests; every ones are noted, and what is left after cleaning up."""
    prompts = [bench.prompt_ids(lm, p) for rows in bench.read_sets([]).values() for p in rows]
    gc.collect()
    rows = [note(lm, 0)]
    for done, ids in track(
        enumerate(itertools.islice(itertools.cycle(prompts), requests), 1), total=requests
    ):
        room = lm.models["target"].context - max_new_tokens
        lm.generate(
            ids[:room], method, max_new_tokens=max_new_tokens, temperature=temperature, seed=done
        )
        if done % every == 0 or done == requests:
            rows.append(note(lm, done))
    gc.collect()
    collected = note(lm, requests)
    lm.engine.stores.clear()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    return {
        "rows": rows,
        "collected": collected,
        "returned": note(lm, requests),
        "live": len(lm.engine.live),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lm = foretell.load(options.model, dtype=options.dtype)
    lm.measure()
    found = grow(
        lm,
        options.method,
        options.requests,
        options.every,
        options.max_new_tokens,
        options.temperature,
    )
    print(f"{'requests':>10} {'resident MB':>12} {'objects':>10} {'learnt MB':>10}")
    named = [(str(row["requests"]), row) for row in found["rows"]]
    for name, row in [*named, ("collected", found["collected"]), ("returned", found["returned"])]:
        resident_mb = row["resident"] / 1e6
        stores_mb = row["stores"] / 1e6
        print(f"{name:>10} {resident_mb:12.1f} {row['objects']:10,} {stores_mb:10.2f}")
    if options.json is not None:
        about = {
            "schema": "foretell.memory/1",
            "version": foretell.__version__,
            "threads": options.threads,
        }
        given = {
            name: getattr(options, name)
            for name in ("model", "method", "max_new_tokens", "temperature")
        }
        options.json.write_text(json.dumps(about | given | found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
