"""Every method of the package on a GPU beside the CPU: `python scripts/gpu.py --out FILE.json`.

CI has no GPU, so this is run by hand where there is one. The command that a method's page tells its
reader to try is run on both devices in float32, at temperature 0 unless it names another, and
the texts are compared. Methods whose command needs a file of its own (a trained head, say) are
named and left out. The exit code is 1 where one fails on the GPU alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]


def run(arguments: list[str]) -> tuple[int, str, str]:
    """The exit status of `foretell` with these arguments, its output, and what it complained of."""
    from foretell.cli import main

    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["foretell", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = int(main() or 0)  # type: ignore[func-returns-value]
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:
            status = -1
            err.write(traceback.format_exc())
    return status, out.getvalue(), err.getvalue()


def words(command: str) -> list[str]:
    """Of a command line, as bash splits it: shlex does not know $'...'."""
    told = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], check=True, capture_output=True, text=True
    )
    return told.stdout.split("\0")[:-1]


def compared(one: tuple[str, list[str]], device: str, tokens: int) -> dict[str, Any]:
    """What a method's command gives on the CPU and on this device."""
    name, command = one
    found: dict[str, Any] = {"name": name, "command": shlex.join(command)}
    texts = []
    for place in ("cpu", device):
        more = ["--device", place, "--dtype", "float32", "--max-new-tokens", str(tokens)]
        if "--temperature" not in command:
            more += ["--temperature", "0"]
        status, out, complaint = run([*command, *more, "--json"])
        if status:
            found[f"{place} failed"] = complaint.strip()[-1500:]
            continue
        document = json.loads(out)
        texts.append(document.get("text") or json.dumps(document.get("texts")))
        found[f"{place} seconds"] = document["stats"]["total_s"]
    found["same"] = len(texts) == 2 and texts[0] == texts[1]
    if len(texts) == 2 and not found["same"]:
        found["texts"] = texts
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Methods on a GPU beside the CPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[], help="names")
    parser.add_argument("--out", type=Path, help="file for all that was found")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import method_pages

    from foretell import cards, registry

    chosen, left = [], []
    for kind, name in sorted(registry.method_files()):
        if options.only and name not in options.only:
            continue
        told = method_pages.command(cards.card(name, kind)).replace("--compare ", "")
        if re.search(r"\b(CANVAS_MODEL|MODEL|FOLDER|FILE)\b", told):
            left.append(name)
        else:
            chosen.append((name, words(told)[1:]))
    work = partial(compared, device=options.device, tokens=options.tokens)
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        found = []
        for one in pool.map(work, chosen):
            found.append(one)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1), "utf-8")
            failed = one.get(f"{options.device} failed") or one.get("cpu failed")
            word = "failed" if failed else "same" if one["same"] else "differs"
            print(f"{one['name']:20} {word} {(failed or '')[-160:]!r}", flush=True)
    print(f"left out: {', '.join(left)}")
    alone = [f"{options.device} failed" in one and "cpu failed" not in one for one in found]
    return int(any(alone))


if __name__ == "__main__":
    sys.exit(main())
