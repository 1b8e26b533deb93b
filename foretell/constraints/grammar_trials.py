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
    """A process that tries forms, one after the other."""

    def __init__(self) -> None:
        python_path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path},
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )
        self.end = weakref.finalize(self, _end_process, self.process)

    def ask_question(self, question: bytes, deadline: float) -> dict[str, Any] | None:
        """Returns the answer; None: the process ended. Raises TimeoutError at the deadline, by
        time.perf_counter(); then the process is to be ended.
        """
        question_pipe, answer_pipe = self.process.stdin, self.process.stdout
        assert question_pipe is not None and answer_pipe is not None, "both ends were asked for"
        answer_poll = select.poll()
        answer_poll.register(answer_pipe, select.POLLIN | select.POLLHUP)
        try:
            question_pipe.write(question + b"\n")
            question_pipe.flush()
        except OSError:
            return None
        answer = b""
        while not answer.endswith(b"\n"):
            remaining_seconds = deadline - time.perf_counter()
            if remaining_seconds <= 0 or not answer_poll.poll(1000 * remaining_seconds):
                raise TimeoutError
            answer_part = os.read(answer_pipe.fileno(), 2**16)
            if not answer_part:
                return None
            answer += answer_part
        parsed_answer: dict[str, Any] = json.loads(answer)
        return parsed_answer


def _end_process(process: subprocess.Popen[bytes]) -> None:
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
        self._ended = 0  # how often `end_processes` was called
        os.register_at_fork(after_in_child=self._forget_processes)

    def ask_process(
        self, question: Mapping[str, Any], tenant: str, seconds: float, deadline: float
    ) -> dict[str, Any]:
        """Returns a process's answer. `seconds`: that the process may take, and that the question
        may wait for others; `deadline`: by time.perf_counter(), when nobody waits any longer.

        Raises BadConfig for a form that takes too long or breaks the process, DeadlineExceeded.
        """
        form_kind, question_line = question["name"], json.dumps(question).encode()
        process = self._take_process(
            form_kind, tenant, min(deadline, time.perf_counter() + seconds)
        )
        is_complete = False
        time_limit = time.perf_counter() + seconds
        try:
            answer = process.ask_question(question_line, min(time_limit, deadline))
            is_complete = answer is not None
        except TimeoutError:
            if deadline < time_limit:
                raise DeadlineExceeded(
                    f"{form_kind}: it was not compiled in the time it had"
                ) from None
            raise BadConfig(
                f"{form_kind}: it takes more than {seconds:g} seconds to compile; simplify it"
            ) from None
        finally:
            self._return_process(process, tenant, is_complete)
        if answer is None:
            raise BadConfig(
                f"{form_kind}: it is too large, or nested too deeply, to compile; simplify it"
            )
        return answer

    def end_processes(self) -> None:
        """Ends the processes: callers that wait for one are refused. Later forms begin others."""
        with self._turn:
            self._ended += 1
            for process in [*self._idle, *self._busy]:
                process.process.kill()
            for process in self._idle:
                process.end()
            self._idle.clear()
            self._turn.notify_all()

    def _take_process(self, name: str, tenant: str, deadline: float) -> Process:
        with self._turn:
            ended_before = self._ended
            while not self._may_start(tenant):
                remaining_seconds = deadline - time.perf_counter()
                if ended_before != self._ended or not remaining_seconds > 0:
                    raise DeadlineExceeded(
                        f"{name}: others were compiled in all the time it could wait; ask again"
                    )
                self._turn.wait(remaining_seconds)
            process = self._idle.pop() if self._idle else Process()
            self._busy.add(process)
            self._of_tenant[tenant] += 1
        return process

    def _may_start(self, tenant: str) -> bool:
        tenant_share = max(1, self.processes - 1)
        return len(self._busy) < self.processes and self._of_tenant[tenant] < tenant_share

    def _return_process(self, process: Process, tenant: str, is_reusable: bool) -> None:
        with self._turn:
            self._busy.discard(process)
            self._of_tenant[tenant] -= 1
            self._of_tenant += Counter()  # without those that have none
            if is_reusable and process.process.poll() is None:
                self._idle.append(process)
            else:
                process.end()
            self._turn.notify_all()

    def _forget_processes(self) -> None:
        """Forgets all processes after a fork: their pipes are the parent's."""
        for process in [*self._idle, *self._busy]:
            process.end.detach()
        self._turn = threading.Condition()
        self._idle, self._busy, self._of_tenant = [], set(), Counter()


TRIALS = Trials()
