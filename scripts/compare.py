"""The published figures: foretell beside every peer that is set up here, on seven kinds of text.

    python scripts/compare.py --threads 2 --json runs/compare.json --page runs/figures.md

Every prompt is run by every contender, one at a time, in an order shuffled each time, `--rounds`
times over after a round that warms up. Each side has a process of its own. What drafters have
learnt is forgotten between rounds. A set of `--sets` may also be a file of prompts, or `random`:
random tokens, of which nothing can be predicted at --temperature 1.5. A .gguf file, or a name that
stands for one such as gemma3-270m, is run in its own formats by both sides, `--dtypes file`. Long
work can be split by `--sets` and joined with `--merge a.json b.json`; ratios are taken within one
part, so a part needs those that shall be compared. A document in dev/measured/real.json is what
scripts/docs.py shows.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from comparison import document, pages, runner, sides
from rich.console import Console

from foretell import bench
from foretell.bench import peers
from foretell.bench.peers import Place
from foretell.bench.peers._worker import Worker
from foretell.bench.prompts import Prompt
from foretell.cli._options import check_method
from foretell.engine.cost_profile import processor_name
from foretell.errors import BadConfig, ForetellError
from foretell.ops.files import write_text

RANDOM = "random"
RANDOM_TOKENS = 64  # of each prompt of that set
LONG_TEXTS = "summarisation"  # the set that long prompts are made of
RANDOM_IDS = (1000, 16000)  # whose tokens are these: ids that vocabularies have, none special
FIRST = "Name three colours."  # the first request after loading


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="a name, a folder or a hub id")
    add("--dtypes", help="number formats, with commas; file: as a .gguf file has them")
    add("--methods", default="plain;auto;suffix", help="ours, with semicolons")
    add("--sets", default=",".join(bench.SETS), help="with commas: names, files or random")
    everybody = ",".join([sides.OURS, *peers.peer_names()])
    add("--contenders", default=everybody, help="libraries, with commas")
    add("--prompts", type=int, default=8, help="of each set")
    add("--tokens", type=int, default=96, help="of each answer")
    add("--rounds", type=int, default=3, help="that count, after one to warm up")
    add("--temperature", type=float, default=0.0)
    add("--threads", type=int, default=2)
    add("--quick", action="store_true", help="one prompt a set, one round")
    add("--merge", type=Path, nargs="+", metavar="JSON", help="join documents, measure nothing")
    add("--json", type=Path, help="write the document")
    add("--page", type=Path, help="write the whole report in Markdown")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    args = parsed(given)
    try:
        if args.merge:
            made = document.merge([document.read(p) for p in args.merge], [*map(str, args.merge)])
        else:
            made = measured(args)
        if args.json:
            write_text(args.json, document.text(made))
        if args.page:
            write_text(args.page, pages.page(made))
    except ForetellError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(pages.summary(made))
    absent = {name: why for part in made["parts"] for name, why in part["absent"].items()}
    for name, why in absent.items():
        print(f"absent: {name}: {why}", file=sys.stderr)
    return 1 if any(name.startswith(sides.OURS) for name in absent) else 0


def measured(args: argparse.Namespace) -> document.Document:
    """The document of one part. Raises BadConfig, RequestFailed or BadFile."""
    torch.set_num_threads(args.threads)  # of measuring the memory
    settings = runner.Settings(
        max_new_tokens=args.tokens,
        temperature=args.temperature,
        rounds=1 if args.quick else args.rounds,
    )
    dtypes = sides.check_dtypes((args.dtypes or sides.usual_dtypes(args.model)).split(","))
    chosen = checked_contenders(args.contenders.split(","))
    for spec in args.methods.split(";"):
        check_method(spec)
    sets = read_sets(args.sets.split(","), 1 if args.quick else args.prompts)
    console = Console(stderr=True)
    here = sides.Sides()
    hosts: list[Worker] = []
    try:
        with console.status("loading") as status:
            host = open_all(args, here, dtypes, chosen, hosts, status.update)
            texts = {name: encoded(host, name, prompts) for name, prompts in sets.items()}
            long = encoded(host, LONG_TEXTS, bench.read_sets([LONG_TEXTS])[LONG_TEXTS])
            part = new_part(here)
            first = host.ask({"encode": [FIRST]})["ids"][0]
            if sides.OURS not in chosen:
                host.close()
            runner.first_tokens(here, first)
            for name, prompts in texts.items():
                status.update(name)
                part["runs"][name] = runner.measure_set(here, prompts, settings, part)
            status.update("prefill")
            part["prefill"] = runner.measure_prefill(here, long, settings)
            status.update("steps")
            part["steps"] = runner.step_costs(here)
            runner.note_peaks(here)
            part["absent"] = here.absent
    finally:
        here.close()
        for worker in hosts:
            worker.close()
    return {
        "schema": document.SCHEMA,
        "settings": {
            "model": Path(args.model).name,
            "threads": args.threads,
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "rounds": settings.rounds,
            "long_prompt": runner.LONG,
        },
        "contenders": part.pop("contenders"),
        "parts": [part],
    }


def checked_contenders(names: Sequence[str]) -> list[str]:
    """Raises BadConfig or UnknownMethod."""
    for name in names:
        if name != sides.OURS:
            peers.check_peer(name)
    return list(names)


def read_sets(names: Sequence[str], most: int) -> dict[str, list[Prompt]]:
    """Prompts by set; those of random tokens are made when the model is known. Raises BadConfig."""
    sets: dict[str, list[Prompt]] = {}
    for name in names:
        if name == RANDOM:
            sets[name] = [""] * 8
        else:
            sets |= bench.read_sets([name])
    if not sets:
        raise BadConfig.field("--sets", ",".join(names), f"some of {', '.join(bench.SETS)}")
    return {name: prompts[:most] for name, prompts in sets.items()}


def encoded(host: Worker, name: str, prompts: Sequence[Prompt]) -> list[list[int]]:
    if name == RANDOM:
        draw = random.Random(0)
        return [[draw.randrange(*RANDOM_IDS) for _ in range(RANDOM_TOKENS)] for _ in prompts]
    ids: list[list[int]] = host.ask({"encode": list(prompts)})["ids"]
    return ids


def open_all(
    args: argparse.Namespace,
    here: sides.Sides,
    dtypes: Sequence[str],
    chosen: Sequence[str],
    hosts: list[Worker],
    tell: Any,
) -> Worker:
    """Starts every side and loads its model; the first process of ours, which knows the prompts."""
    threads = args.threads
    place: dict[str, Any] = {}
    for dtype in dtypes if sides.OURS in chosen else dtypes[:1]:
        tell(f"loading {sides.OURS} {dtype}")
        worker, told = sides.open_host(args.model, dtype, threads)
        hosts.append(worker)
        place = {"model": told["path"] or args.model, "eos": tuple(told["eos"])}
        if sides.OURS in chosen:
            sides.add_ours(here, worker, told, dtype, args.methods.split(";"))
    common = {"draft": None, "device": "cpu", "threads": threads, **place}
    if sides.BASE in chosen:
        sides.add_peer(here, sides.BASE, Place(dtype="bfloat16", **common))
    for dtype in dtypes:
        for name in sides.peers_of(dtype):
            if name in chosen:
                tell(f"loading {name} {dtype}")
                sides.add_peer(here, name, Place(dtype=dtype, **common))
    if not here.contenders:
        why = "; ".join(here.absent.values())
        raise BadConfig(f"--contenders {','.join(chosen)}: none of them can run here ({why})")
    return hosts[0]


def new_part(here: sides.Sides) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": processor_name(),
        "cores": os.cpu_count(),
        "versions": {
            "torch": torch.__version__.partition("+")[0],
            "transformers": transformers.__version__,
        },
        "contenders": {c.name: c.describe() for c in here.contenders},
        "load": here.opened,
        "memory_rate": [],
        "runs": {},
        "prefill": [],
        "steps": {},
    }


if __name__ == "__main__":
    sys.exit(main())
