"""Takes the figures of the README and the pages anew, all or some, where they have expired.

    python scripts/figures.py [NAME ...] [--fresh]

Without names: those that were never taken or rest on what has changed since (scripts/basis.py).
`--fresh` takes them in any case, from the beginning. All but `engines` go on where they were
interrupted: what is done lies in runs/figures. When one is through, its document is in
dev/measured, its record in dev/measured/taken.toml, and `python scripts/docs.py` puts its tables
into the pages. Timings beside other work are worthless: run nothing else meanwhile. All of them
take about two hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import basis  # noqa: E402
import figure_tables as tables  # noqa: E402
from comparison import document as comparison  # noqa: E402

from foretell.engine.cost_profile import processor_name  # noqa: E402
from foretell.errors import ForetellError, RequestFailed  # noqa: E402
from foretell.ops.files import write_text  # noqa: E402

RUNS = ROOT / "runs" / "figures"
MODEL = "smollm2"
THREADS = "2"
PORT = 8731
POLICIES = ("", "snapkv:budget=1024", "streaming-llm:sinks=4,window=1020,every=64")
LONG = 7900  # tokens of the prompt that cache policies are timed after
ANSWER = 80  # tokens written after it
QUESTIONS = 24  # of the batch after one system prompt
FEW = 4  # prompts of each kind
RULES = 80  # lines of that prompt, some 12 tokens each
DOCUMENTS = {"engines": "real.json"}  # of others: NAME.json


# Writes what it has into the folder as it goes on, and returns the document of dev/measured.
Measure = Callable[[Path], dict[str, Any]]


def call(*arguments: str) -> str:
    """Runs a command of this Python; returns what it wrote on standard error.

    Raises RequestFailed with its last line where it fails.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": THREADS}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise RequestFailed(f"{' '.join(arguments[:3])} failed: {last}; run it alone to see why")
    return done.stderr


def instructions() -> str:
    """The widest of those that decide what several tokens cost beside one."""
    known = Path("/proc/cpuinfo")
    flags = known.read_text("utf-8").split() if known.exists() else []
    names = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for flag, name in names.items() if flag in flags), "no AVX2")


def about(how: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "threads": int(THREADS),
        "cores": os.cpu_count(),
        "processor": f"{processor_name()}, {instructions()}",
        "how": how,
    }


# --- what is measured


def engines(folder: Path) -> dict[str, Any]:
    """foretell beside other engines: scripts/compare.py, from the beginning if interrupted."""
    whole = folder / "whole.json"
    asked = ["--prompts", "4", "--rounds", "1", "--tokens", "64", "--methods", "plain;auto"]
    call("scripts/compare.py", *asked, "--threads", THREADS, "--json", str(whole))
    return dict(json.loads(whole.read_text("utf-8")))


def shortest(folder: Path) -> list[str]:
    """The arguments that name files with the FEW shortest prompts of each kind."""
    named = []
    for kind in tables.SETS:
        lines = (ROOT / "foretell" / "assets" / "prompts" / f"{kind}.jsonl").read_text("utf-8")
        path = folder / f"{kind}.jsonl"
        write_text(path, "".join(f"{line}\n" for line in sorted(lines.splitlines(), key=len)[:FEW]))
        named += ["--prompts", str(path)]
    return named


def bench(how: str, *asked: str, few: bool = False) -> Measure:
    """A figure that `foretell bench` measures, which continues its own documents.

    `few`: on the shortest prompts of each kind.
    """

    def measure(folder: Path) -> dict[str, Any]:
        path = folder / "bench.json"
        shared = ["--model", MODEL, "--threads", THREADS, "--json", str(path)]
        shared += shortest(folder) if few else []
        call("-m", "foretell", "bench", *shared, *asked)
        whole = json.loads(path.read_text("utf-8"))
        kept = ("dtype", "set", "temperature", "requests", "contender", "tokens_per_s", "MAT")
        cells = [
            {name: cell.get(name) for name in kept} | {"ratio": cell["ratio_to_plain"]}
            for cell in whole["cells"]
            if cell["contender"] != "plain" and cell.get("ratio_to_plain")
        ]
        return {"about": about(how), "cells": cells}

    return measure


def never_slower(dtype: str) -> Measure:
    """`auto` beside plain decoding at every temperature, load and kind of text."""
    return bench(
        f"32 tokens, the {FEW} shortest prompts of each kind, two rounds that both begin with "
        "nothing learnt; ranges hold nine tenths of all.",
        *("--dtype", dtype, "--temperature", "0,0.7,1", "--methods", "auto"),
        *("--requests", "1,2,4,8,16", "--rounds", "2", "--warm-up", "1"),
        *("--max-new-tokens", "32"),
        few=True,
    )


@contextmanager
def served(keys: Path, *options: str) -> Iterator[str]:
    """A server of ours; gives its address."""
    command = [sys.executable, "-m", "foretell", "serve", "--model", MODEL, "--port", str(PORT)]
    command += ["--api-key-file", str(keys), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": THREADS}
    url = f"http://127.0.0.1:{PORT}"
    with open(keys.with_suffix(".log"), "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(600):
            if server.poll() is not None:
                raise RequestFailed(
                    f"the server did not start; {keys.with_suffix('.log')} says why"
                )
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def serving(folder: Path) -> dict[str, Any]:
    """Our server under load, with speculation and without, alone and after one beginning."""
    keys = folder / "keys.txt"
    keys.write_text("".join(f"k-{secrets.token_hex(12)}\n" for _ in range(99)))
    keys.chmod(0o600)
    loads = {
        "8 bits": ("int8", ["--clients", "1,2,4,8,16,32", "--rounds", "2", "--requests", "3"]),
        "16 bits": ("bfloat16", ["--clients", "1,4,16", "--rounds", "1", "--requests", "3"]),
        "8 bits after 1,200 words": (
            "int8",
            ["--clients", "1,8,16", "--prefix", "1200", "--rounds", "1", "--requests", "2"],
        ),
    }
    levels: dict[str, Any] = {}
    for number, (title, (dtype, asked)) in enumerate(loads.items()):
        path = folder / f"{number}.json"
        if not path.exists():
            beside = ["--beside", '{"speculation": "off"}', "--keys", str(keys)]
            with served(keys, "--dtype", dtype) as url:
                call("scripts/load.py", url, *asked, *beside, "--json", str(path))
        levels[title] = [
            level | {"as": "without speculation" if level["fields"] else "`auto`"}
            for level in json.loads(path.read_text("utf-8"))["levels"]
        ]
    how = "Each client asks one question at a time, in streams of at most 64 tokens, greedy."
    return {"about": about(how), "levels": levels}


def batch(folder: Path) -> dict[str, Any]:
    """`foretell batch`: chats after one system prompt, by method, in turns."""
    source = folder / "requests.jsonl"
    texts = (ROOT / "foretell" / "assets" / "texts" / "questions.jsonl").read_text("utf-8")
    rules = "\n".join(f"Rule {i}: be brief, be kind, and say so if unsure." for i in range(RULES))
    with open(source, "w") as file:
        for number, line in enumerate(texts.splitlines()[:QUESTIONS]):
            messages = [
                {"role": "system", "content": rules},
                {"role": "user", "content": json.loads(line)["question"]},
            ]
            body = {"messages": messages, "max_completion_tokens": 64, "temperature": 0}
            request = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps(request | {"body": body}) + "\n")
    runs: dict[str, list[dict[str, float]]] = {}
    for number in range(2):
        for method in ("auto", "suffix", "plain"):
            results = folder / f"{method}-{number}.jsonl"
            told = folder / f"{method}-{number}.txt"
            if not told.exists():
                results.unlink(missing_ok=True)
                asked = ["--model", MODEL, "--dtype", "int8", "--method", method]
                said = call(
                    *("-m", "foretell", "batch", *asked),
                    *("--in", str(source), "--out", str(results)),
                )
                told.write_text(said)
            runs.setdefault(method, []).append(told_of(told.read_text()))
    how = f"{QUESTIONS} chats after one system prompt, at most 64 tokens each, 8 bits, greedy."
    return {"about": about(how), "runs": runs}


def told_of(said: str) -> dict[str, float]:
    """The numbers of the line that a batch ends with."""
    line = next(line for line in said.splitlines() if " tokens/s" in line)
    speed = float(line.partition(" tokens/s")[0].rpartition(" ")[2].replace(",", ""))
    shared = line.partition("%")[0].rpartition(" ")[2] if "%" in line else "0"
    return {"tokens_per_s": speed, "shared": float(shared) / 100}


def kv(folder: Path) -> dict[str, Any]:
    """Plain decoding after a long prompt, by cache policy and format, in turns."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for dtype in ("int8", "bfloat16"):
        path = folder / f"{dtype}.json"
        if not path.exists():
            write_text(path, json.dumps(timed_policies(dtype)))
        seconds[dtype] = json.loads(path.read_text("utf-8"))
    how = f"A prompt of {LONG:,} tokens, plain decoding of {ANSWER} tokens, two rounds in turns."
    return {"about": about(how), "seconds": seconds}


def timed_policies(dtype: str) -> dict[str, list[float]]:
    import torch

    import foretell

    torch.set_num_threads(int(THREADS))
    lm = foretell.load(MODEL, dtype=dtype)
    text = " ".join(f"{i} is one more than {i - 1}." for i in range(1, 2 * LONG))
    prompt = lm.encode(text)[:LONG]
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in range(2):
        for policy in POLICIES:
            given: dict[str, Any] = {"kv": policy} if policy else {}
            marks = [
                time.perf_counter()
                for piece in lm.stream(
                    prompt, "plain", max_new_tokens=ANSWER, ignore_eos=True, **given
                )
                if piece.tokens
            ]
            gaps = [after - before for before, after in pairwise(marks)]
            found[policy].append(statistics.median(gaps))
    return found


FIGURES: dict[str, Measure] = {
    "batch": batch,
    "kv": kv,
    "serving": serving,
    "draft": bench(
        "48 tokens, the median of 4 prompts of each kind, one round.",
        *("--draft", "smollm2-draft", "--dtype", "int8,bfloat16", "--temperature", "0,1"),
        *("--prompts", "chat", "--prompts", "code", "--rounds", "1", "--max-new-tokens", "48"),
        *("--methods", "auto,draft,draft:best=yes,suffix,suffix+draft:best=yes"),
    ),
    "never-slower": never_slower("int8"),
    "never-slower-16": never_slower("bfloat16"),
    "never-slower-4": never_slower("int4"),
    "engines": engines,
}


def take(name: str, fresh: bool) -> None:
    """Measures a figure, and writes its document and its record."""
    folder = RUNS / name
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    rests = {what: basis.basis()[what] for what in basis.RESTS[name]}
    # What was begun on another basis is worth nothing here.
    begun = folder / "rests.json"
    if begun.exists() and json.loads(begun.read_text("utf-8")) != rests:
        shutil.rmtree(folder)
        folder.mkdir()
    write_text(begun, json.dumps(rests))
    made = FIGURES[name](folder)
    write_text(tables.MEASURED / DOCUMENTS.get(name, f"{name}.json"), text(made))
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    record = {
        "command": f"python scripts/figures.py {name}",
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "default": basis.default(),
        "rests": rests,
    }
    records = (basis.taken() if basis.TAKEN.exists() else {}) | {name: record}
    write_text(basis.TAKEN, written(records))


def text(made: dict[str, Any]) -> str:
    return comparison.text(made) if "schema" in made else json.dumps(made, indent=1) + "\n"


def written(records: dict[str, dict[str, Any]]) -> str:
    """The records as TOML. Strings of JSON are strings of TOML."""
    lines = ["# Made by scripts/figures.py: which figures were taken when, and what they rest on."]
    for name, record in sorted(records.items()):
        lines += ["", f"[{json.dumps(name)}]"]
        lines += [f"{key} = {json.dumps(record[key])}" for key in record if key != "rests"]
        lines += [f"rests.{key} = {json.dumps(value)}" for key, value in record["rests"].items()]
    return "\n".join(lines) + "\n"


def due(names: Sequence[str], fresh: bool) -> list[str]:
    """Of these figures those that have to be taken, the shortest first."""
    records = basis.taken() if basis.TAKEN.exists() else {}
    late = [
        name
        for name in FIGURES
        if name not in records or basis.expired({name: records[name]}, basis.basis())
    ]
    return [name for name in FIGURES if name in names and (fresh or name in late)]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], help="without any: all")
    parser.add_argument("--fresh", action="store_true", help="also those that still hold")
    args = parser.parse_args(given)
    wanted = due(args.names or [*FIGURES], args.fresh)
    for number, name in enumerate(wanted, 1):
        print(f"{number} of {len(wanted)}: {name}", file=sys.stderr)
        began = time.perf_counter()
        try:
            take(name, args.fresh)
        except ForetellError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        print(f"{name}: {time.perf_counter() - began:,.0f} s", file=sys.stderr)
    print("python scripts/docs.py puts them into the pages" if wanted else "all figures still hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
