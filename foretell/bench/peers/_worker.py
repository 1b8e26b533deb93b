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

    def __init__(
        self, name: str, description: str, environment: Environment, options: dict[str, Any]
    ):
        self.name, self.about, self.environment, self.options = (
            name,
            description,
            environment,
            options,
        )
        self.process: subprocess.Popen[str] | None = None

    def open(self) -> float:
        """Starts the process and loads the model; returns the seconds that loading took. Raises
        RequestFailed.
        """
        loading_seconds = self.ask({"open": True}).get("opened")
        if not isinstance(loading_seconds, float):
            raise self.failed(NO_ANSWER)
        return loading_seconds

    def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        """`ids` -> the new tokens, and when they came. Raises RequestFailed, in one line."""
        return self.generation(
            {"ids": ids, "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        )

    def generation(self, request: dict[str, Any]) -> Run:
        """Sends a request to generate and returns its result. Raises RequestFailed."""
        from foretell.bench.peers import Run

        answer = self.ask(request)
        try:
            run = Run(*(list(map(value_type, answer[key])) for key, value_type in ANSWER.items()))
        except (ValueError, TypeError, KeyError):
            raise self.failed(NO_ANSWER) from None
        is_consistent = len(run.times) == len(run.counts) and sum(run.counts) == len(run.tokens)
        if not run.tokens or not is_consistent:
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
        timeout_reason = (
            f"it had not answered after {PATIENCE:g} seconds" if not alarm.is_alive() else ""
        )
        alarm.cancel()
        alarm.join()
        if not line:
            raise self.failed(timeout_reason or _describe_exit(process))
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self.failed(NO_ANSWER)
        if "error" in answer:
            raise self.failed(str(answer["error"]))
        return answer

    def failed(self, reason: str) -> RequestFailed:
        """Ends the process and returns the error to raise."""
        from foretell.errors import RequestFailed

        self.close()
        return RequestFailed(f"{self.name}: {reason}")

    def memory(self) -> tuple[int, int] | None:
        """Bytes of the process that are resident, and the most that ever were; None where the
        system does not tell, or nothing runs.
        """
        if self.process is None:
            return None
        try:
            status_lines = Path(f"/proc/{self.process.pid}/status").read_text("utf-8").splitlines()
            status_fields = dict(line.split(":", 1) for line in status_lines)
            resident, peak = (
                1024 * int(status_fields[name].split()[0]) for name in ("VmRSS", "VmHWM")
            )
        except (OSError, KeyError):
            return None
        return resident, peak

    def close(self) -> None:
        if self.process is not None:
            _kill_process(self.process)
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
        weakref.finalize(self, _kill_process, self.process)
        return self.process


def _describe_exit(process: subprocess.Popen[str]) -> str:
    exit_code = process.wait()
    ending = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    return f"its process ended with {ending}"


def _kill_process(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # a request that it did not read
                pipe.close()
    process.wait()
