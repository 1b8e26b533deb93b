"""Forms are tried in processes of their own before anything else meets them.

Compiling one may take long, take much memory, or end the process that does it. So a process that
can be ended tries each form first, within a time, and tells how its texts end:
constraints.grammar_worker. Processes are started when they are needed, and end with the one that
started them.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from foretell.errors import BadConfig, DeadlineExceeded

PROCESSES = 2
WORKER = "foretell.constraints.grammar_worker"


class Process:
    """One that tries forms, one after the other."""

    def __init__(self) -> None:
        places = os.pathsep.join(place or os.getcwd() for place in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": places},
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )
        self.end = weakref.finalize(self, _end, self.process)

    def ask(self, question: bytes, deadline: float) -> dict[str, Any] | None:
        """The answer; None: the process ended. Raises TimeoutError at the deadline, by
        time.perf_counter(); then it is to be ended.
        """
        asking, answering = self.process.stdin, self.process.stdout
        assert asking is not None and answering is not None, "both ends were asked for"
        poll = select.poll()
        poll.register(answering, select.POLLIN | select.POLLHUP)
        try:
            asking.write(question + b"\n")
            asking.flush()
        except OSError:
            return None
        answer = b""
        while not answer.endswith(b"\n"):
            left = deadline - time.perf_counter()
            if left <= 0 or not poll.poll(1000 * left):
                raise TimeoutError
            part = os.read(answering.fileno(), 2**16)
            if not part:
                return None
            answer += part
        found: dict[str, Any] = json.loads(answer)
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.wait()


class Trials:
    """The processes, shared by all models of a program. Threads may share it.

    One tenant has at most all processes but one, so that another's forms are tried meanwhile.
    """

    def __init__(self, processes: int = PROCESSES):
        self.processes = processes
        self._turn = threading.Condition()
        self._idle: list[Process] = []
        self._busy: set[Process] = set()
        self._of_tenant: Counter[str] = Counter()
        self._ended = 0  # how often `end` was called
        os.register_at_fork(after_in_child=self._forget)

    def ask(
        self, question: Mapping[str, Any], tenant: str, seconds: float, deadline: float
    ) -> dict[str, Any]:
        """What a process answers. `seconds`: that it may take, and that it may wait for others;
        `deadline`: by time.perf_counter(), when nobody waits any longer.

        Raises BadConfig for a form that takes too long or breaks the process, DeadlineExceeded.
        """
        name, line = question["name"], json.dumps(question).encode()
        process = self._taken(name, tenant, min(deadline, time.perf_counter() + seconds))
        whole = False
        until = time.perf_counter() + seconds
        try:
            answer = process.ask(line, min(until, deadline))
            whole = answer is not None
        except TimeoutError:
            if deadline < until:
                raise DeadlineExceeded(f"{name}: it was not compiled in the time it had") from None
            raise BadConfig(
                f"{name}: it takes more than {seconds:g} seconds to compile; simplify it"
            ) from None
        finally:
            self._back(process, tenant, whole)
        if answer is None:
            raise BadConfig(
                f"{name}: it is too large, or nested too deeply, to compile; simplify it"
            )
        return answer

    def end(self) -> None:
        """Ends the processes: whoever waits for one is refused. Later forms begin others."""
        with self._turn:
            self._ended += 1
            for process in [*self._idle, *self._busy]:
                process.process.kill()
            for process in self._idle:
                process.end()
            self._idle.clear()
            self._turn.notify_all()

    def _taken(self, name: str, tenant: str, deadline: float) -> Process:
        with self._turn:
            ended = self._ended
            while not self._free(tenant):
                left = deadline - time.perf_counter()
                if ended != self._ended or not left > 0:
                    raise DeadlineExceeded(
                        f"{name}: others were compiled in all the time it could wait; ask again"
                    )
                self._turn.wait(left)
            process = self._idle.pop() if self._idle else Process()
            self._busy.add(process)
            self._of_tenant[tenant] += 1
        return process

    def _free(self, tenant: str) -> bool:
        share = max(1, self.processes - 1)
        return len(self._busy) < self.processes and self._of_tenant[tenant] < share

    def _back(self, process: Process, tenant: str, whole: bool) -> None:
        with self._turn:
            self._busy.discard(process)
            self._of_tenant[tenant] -= 1
            self._of_tenant += Counter()  # without those that have none
            if whole and process.process.poll() is None:
                self._idle.append(process)
            else:
                process.end()
            self._turn.notify_all()

    def _forget(self) -> None:
        """After a fork: the pipes are the parent's."""
        for process in [*self._idle, *self._busy]:
            process.end.detach()
        self._turn = threading.Condition()
        self._idle, self._busy, self._of_tenant = [], set(), Counter()


TRIALS = Trials()
