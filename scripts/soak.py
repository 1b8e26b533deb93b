"""Mixed clients against a live server for minutes, and then: was every answer right?

    python scripts/soak.py --model smollm2                  # 32 clients, 10 minutes
    python scripts/soak.py --model demo --seconds 30 --warm-up 10

Starts `foretell serve` in float32 on loopback. Its clients ask for texts of random lengths with
random sampling, forms, priorities and deadlines, whole or streamed; they leave at random points and
send bodies that are too long or wrong. Then it waits until nothing is in flight, and checks: every
finished greedy answer is, token for token, what `lm.generate` gives offline by plain decoding;
forms were kept; nobody waited beyond a deadline; no status was 5xx; the server's memory, but
for what it keeps of texts up to a limit (rows of prompts, and what drafters learnt), is within 2 %
of what it was after the warm-up, which is judged where that took two minutes or more; /health found
all caches sound. Prints one JSON document, and on standard error what it is at; exit code 1 where a
check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from soak_clients import Answer, clients  # noqa: E402

import foretell  # noqa: E402
from foretell.progress import show_working  # noqa: E402
from foretell.serve.chats import plain_chat  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foretell.api.lm import LM
    from foretell.api.outputs import Output

START, SETTLE = 300.0, 180.0  # seconds until a server answers; until it is idle and checked
MEMORY = 0.02  # share by which it may grow
LONG = 120.0  # seconds of a warm-up, after which a process has taken what it needs


# --- comparing


def compare(lm: LM, greedy: dict[str, list[tuple[str, Answer]]], name: str) -> dict[str, Any]:
    """Every greedy answer beside what `lm` gives by plain decoding. Returns counts, and of each
    difference how near the two best tokens were to each other where it begins.
    """
    from foretell.serve.served import Served

    served = Served(lm, name)
    compared = 0
    different = []
    for key, answers in greedy.items():
        expected = offline(lm, json.loads(key))
        spoken = [token for token in expected.tokens if token not in lm.engine.eos]
        tokens = [served.token_text(token) for token in spoken]
        for how, answer in answers:
            compared += 1
            same = answer.text == expected.text and answer.count == len(expected.tokens)
            if answer.tokens is not None:
                same = same and answer.tokens[: len(tokens)] == tokens
            if not same:
                different.append(
                    {
                        "request": key[:300],
                        "method": how,
                        "text": answer.text[:300],
                        "expected": expected.text[:300],
                        "margin": margin(expected, answer, tokens),
                    }
                )
    return {"compared": compared, "distinct": len(greedy), "different": different}


def offline(lm: LM, body: dict[str, Any]) -> Output:
    """The answer of plain decoding to the body of a greedy request."""
    prompt: Any = body.get("prompt")
    if prompt is None:
        prompt = body["messages"]
        if lm.tokenizer is None or not lm.tokenizer.chat_template:
            prompt = plain_chat(prompt)
    ids = lm.prompt_ids(prompt)
    room = lm.models["target"].context - len(ids)
    answer: Output = lm.generate(
        ids,
        "plain",
        max_new_tokens=min(body["max_tokens"], room),
        stop=tuple(body.get("stop", ())),
        frequency_penalty=body.get("frequency_penalty", 0.0),
        logprobs=2,
    )
    return answer


def margin(expected: Output, answer: Answer, tokens: Sequence[str]) -> float | None:
    """How much likelier (in logarithms) the best token was than the next one where the answer first
    differs; None where that cannot be told.
    """
    if answer.tokens is None or expected.logprobs is None:
        return None
    for place, (token, other) in enumerate(zip(answer.tokens, tokens, strict=False)):
        if token != other:
            best, second = (entry["logprob"] for entry in expected.logprobs[place]["top"])
            return float(best - second)
    return None


# --- the server


@contextmanager
def server(
    model: str, options: Sequence[str]
) -> Iterator[tuple[str, subprocess.Popen[bytes], IO[bytes]]]:
    """`foretell serve` on loopback: its address, process and log. Ended by SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "foretell", "serve", "--model", model, "--dtype", "float32"]
    # A store of prefixes that the warm-up fills, so that it does not grow afterwards.
    command += ["--prefix-memory", "0.05"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options], cwd=ROOT, stdout=log, stderr=log
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: started(url, process, log), START, "the server does not answer")
            yield url, process, log
            process.terminate()
            if process.wait(START):
                raise SystemExit(f"error: the server ended with {process.returncode}: {last(log)}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def started(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> bool:
    if process.poll() is not None:
        raise SystemExit(f"error: the server did not start: {last(log)}")
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def last(log: IO[bytes]) -> str:
    """The last line of a log."""
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def tracebacks(log: IO[bytes]) -> list[str]:
    """The first few of a log, each with the line before it."""
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()
    places = [place for place, line in enumerate(lines) if line.startswith("Traceback")]
    return ["\n".join(lines[max(0, place - 1) : place + 60]) for place in places[:3]]


def wait_for(holds: Callable[[], bool], seconds: float, otherwise: str) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise SystemExit(f"error: {otherwise} within {seconds:.0f} s")
        time.sleep(0.2)


def resident(process: int) -> int:
    """Bytes of memory that a process holds."""
    lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return 1024 * int(sizes["VmRSS"].split()[0])


def memory(url: str, process: int) -> dict[str, int]:
    """Bytes that the server holds, and those of them that it keeps of texts up to a limit."""
    status = httpx.get(f"{url}/foretell/status", trust_env=False).json()
    kept = status["prefix_bytes"] + status["learnt_bytes"]
    return {"resident": resident(process), "kept": kept}


def settled(url: str) -> dict[str, Any]:
    """What /health says once nothing is in flight and it has looked at all caches since."""
    http = httpx.Client(base_url=url, timeout=START, trust_env=False)

    def numbers(path: str) -> dict[str, Any]:
        document: dict[str, Any] = http.get(path).json()
        return document

    with http:
        wait_for(lambda: not numbers("/health")["requests"], SETTLE, "requests are still in flight")
        status = numbers("/foretell/status")
        if status["running"] or status["waiting"]:
            raise SystemExit("error: nothing is in flight, but the engine has requests")
        before = numbers("/health")["integrity"]["checked"]
        wait_for(
            lambda: numbers("/health")["integrity"]["checked"] not in (None, before),
            SETTLE,
            "caches were not checked",
        )
        return numbers("/health")


def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole of it, as a document."""
    options = arguments.server.split()
    at = partial(show_working, console=Console(stderr=True, highlight=False))
    with server(arguments.model, options) as (url, process, log):
        about = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]
        count, context = arguments.clients, about["max_model_len"]
        with at(f"warming up for {arguments.warm_up:.0f} s"):
            asyncio.run(clients(url, count, arguments.warm_up, arguments.seed + 1, context))
            settled(url)
        before = memory(url, process.pid)
        with at(f"{count} clients for {arguments.seconds:.0f} s, and until caches are checked"):
            tally = asyncio.run(clients(url, count, arguments.seconds, arguments.seed, context))
            health = settled(url)
        after = memory(url, process.pid)
        status = httpx.get(f"{url}/foretell/status", trust_env=False).json()
        errors = tracebacks(log)
    with at(f"comparing {len(tally.greedy)} texts with plain decoding"):
        lm = foretell.load(arguments.model, dtype="float32")
        found = compare(lm, tally.greedy, about["id"])
    growth = (after["resident"] - after["kept"]) / (before["resident"] - before["kept"]) - 1
    checks: dict[str, bool | None] = {  # None: not judged
        "greedy answers are those of plain decoding": not found["different"],
        "answers were compared": found["compared"] > 0,
        "no request was answered wrongly or late": not tally.faults,
        "memory is where it was": abs(growth) <= MEMORY if arguments.warm_up >= LONG else None,
        "caches are sound": health["status"] == "ok" and not health["integrity"]["troubles"],
    }
    return {
        "schema": "foretell.soak/1",
        "version": foretell.__version__,
        "arguments": vars(arguments),
        "requests": sum(tally.kinds.values()),
        "kinds": dict(tally.kinds),
        "statuses": dict(tally.statuses),
        "faults": tally.faults[:20],
        "errors": errors,
        "latest_s": tally.latest,
        "greedy": found,
        "memory": {"before": before, "after": after, "growth": growth},
        "health": health,
        "status": {name: value for name, value in status.items() if name != "methods"},
        "checks": checks,
        "passed": all(held is not False for held in checks.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--warm-up", type=float, default=300.0, help="seconds before it")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", default="", help="more options of foretell serve, as one text")
    document = soak(parser.parse_args())
    print(json.dumps(document, indent=1, ensure_ascii=False))
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
