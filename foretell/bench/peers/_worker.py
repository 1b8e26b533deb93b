"""A peer in a process of its own: requests go in and answers come out as lines of JSON.

The process (see _process.py) imports the peer's file, which has `start(options)`, a function that
returns one like Peer.run, timed inside the process, and for models in a format of its own
`convert(options)`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.bench.peers import Run
    from foretell.bench.peers._environment import Environment
    from foretell.errors import RequestFailed

ANSWER = {"tokens": int, "times": float, "counts": int}
NO_ANSWER = "its process answered something that is no answer"
PATIENCE = 900.0  # seconds for an answer, the first of which waits for the model to be loaded


class Worker:
    """A way of decoding. Its process starts with the first run and ends with a failure, `close`, or
    this object.
    """

    def __init__(self, name: str, about: str, environment: Environment, options: dict[str, Any]):
        self.name, self.about, self.environment, self.options = name, about, environment, options
        self.process: subprocess.Popen[str] | None = None

    def open(self) -> float:
        """Starts the process and loads the model; the seconds that loading took. Raises
        RequestFailed.
        """
        opened = self.ask({"open": True}).get("opened")
        if not isinstance(opened, float):
            raise self.failed(NO_ANSWER)
        return opened

    def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        """`ids` -> the new tokens, and when they came. Raises RequestFailed, in one line."""
        return self.generation(
            {
                "ids": ids,
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "seed": seed,
            }
        )

    def generation(self, request: dict[str, Any]) -> Run:
        """What came of a request to generate. Raises RequestFailed."""
        from foretell.bench.peers import Run

        answer = self.ask(request)
        try:
            run = Run(*(list(map(kind, answer[key])) for key, kind in ANSWER.items()))
        except (ValueError, TypeError, KeyError):
            raise self.failed(NO_ANSWER) from None
        whole = len(run.times) == len(run.counts) and sum(run.counts) == len(run.tokens)
        if not run.tokens or not whole:
            raise self.failed(NO_ANSWER)
        return run

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The process's answer. Raises RequestFailed, which ends it."""
        process = self.process or self._started()
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(
            PATIENCE, process.kill
        )  # or one that hangs would keep all others waiting
        alarm.start()
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except OSError:
            line = ""
        late = f"it had not answered after {PATIENCE:g} seconds" if not alarm.is_alive() else ""
        alarm.cancel()
        alarm.join()
        if not line:
            raise self.failed(late or _ended(process))
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self.failed(NO_ANSWER)
        if "error" in answer:
            raise self.failed(str(answer["error"]))
        return answer

    def failed(self, why: str) -> RequestFailed:
        """Ends the process; the error to raise."""
        from foretell.errors import RequestFailed

        self.close()
        return RequestFailed(f"{self.name}: {why}")

    def memory(self) -> tuple[int, int] | None:
        """Bytes of the process that are resident, and the most that ever were; None where the
        system does not tell, or nothing runs.
        """
        if self.process is None:
            return None
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text("utf-8").splitlines()
            sizes = dict(line.split(":", 1) for line in lines)
            now, most = (1024 * int(sizes[name].split()[0]) for name in ("VmRSS", "VmHWM"))
        except (OSError, KeyError):
            return None
        return now, most

    def close(self) -> None:
        if self.process is not None:
            _end(self.process)
            self.process = None

    def _started(self) -> subprocess.Popen[str]:
        variables = self.environment.variables() | {
            "OMP_NUM_THREADS": str(self.options.get("threads", 1))
        }
        command = self.environment.command("start", self.options)
        self.process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        weakref.finalize(self, _end, self.process)
        return self.process


def _ended(process: subprocess.Popen[str]) -> str:
    code = process.wait()
    return (
        f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # a request that it did not read
                pipe.close()
    process.wait()
