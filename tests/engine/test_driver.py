"""Any number of callers of one engine: threads, event loops, interruptions, forks, and the end of
the process.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell import LM, Output
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, RequestFailed, Unsupported
from foretell.ops import threads as thread_counts
from tests import tiny
from tests.gate import Gate

PROMPTS = ["def add(a, b):\n    return a", "The quick brown fox jumps over", "x = 1\ny = x", "a"]
METHODS = ["plain", "ngram:nodes=6", "token-recycling:nodes=6", "draft:nodes=6"]
LONG: dict[str, Any] = {"max_new_tokens": 90, "ignore_eos": True}


@pytest.fixture
def lm() -> LM:
    return tiny.lm()


def text(lm: LM, prompt: str, method: str = "plain", count: int = 20, **more: Any) -> str:
    out = lm.generate(prompt, method, max_new_tokens=count, **more)
    assert isinstance(out, Output)
    return out.text


def idle(lm: LM) -> bool:
    return not (lm.engine.live or lm.engine.events or lm.driver._calls)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


# --- threads


def test_eight_threads_get_what_each_gets_alone() -> None:
    jobs = []
    for i, prompt in enumerate(PROMPTS):
        for j, method in enumerate(METHODS):
            jobs.append((prompt, method, 12 + 3 * j, {"seed": i, "temperature": 0.8 * (i % 2)}))
    expected = [text(tiny.lm(), *job[:3], **job[3]) for job in jobs]
    shared = tiny.lm()

    def work(number: int) -> bool:
        right = True
        for k in range(6):
            at = (5 * number + k) % len(jobs)
            prompt, method, count, more = jobs[at]
            if (number + k) % 2:
                answer = text(shared, prompt, method, count, **more)
            else:
                pieces = shared.stream(prompt, method, max_new_tokens=count, **more)
                answer = "".join(piece.text for piece in pieces)
            right = right and answer == expected[at]
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert idle(shared)


def test_two_streams_of_two_threads_take_turns(lm: LM) -> None:
    expected = [text(tiny.lm(), prompt, count=40, ignore_eos=True) for prompt in PROMPTS[:2]]
    order: list[int] = []
    both_began = threading.Barrier(2)

    def read(number: int) -> str:
        parts = []
        stream = lm.stream(PROMPTS[number], "plain", max_new_tokens=40, ignore_eos=True)
        for piece in stream:
            if not parts:
                both_began.wait(30)
            order.append(number)
            parts.append(piece.text)
        return "".join(parts)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, range(2))) == expected
    assert set(order) == {0, 1} and idle(lm)


def test_one_stream_may_be_read_by_several_threads_in_turn(lm: LM) -> None:
    stream = lm.stream(PROMPTS[0], "plain", max_new_tokens=12)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, stream).result()
    assert first.text + "".join(piece.text for piece in stream) == text(
        tiny.lm(), PROMPTS[0], count=12
    )


def test_requests_of_several_threads_share_forwards(lm: LM) -> None:
    gate = Gate(wait_at=2)
    threads = []
    with ThreadPoolExecutor(3) as pool:
        threads.append(pool.submit(text, lm, PROMPTS[0], logits_processors=gate, **LONG_TEXT))
        gate.reached.wait(30)
        before = lm.models["target"].calls
        for prompt in PROMPTS[1:3]:
            threads.append(pool.submit(text, lm, prompt, **LONG_TEXT))
        assert eventually(lambda: lm.driver._waiting == 2)
        gate.open()
        for future in threads:
            future.result()
    calls = lm.models["target"].calls - before
    assert calls < 1.5 * 60, f"{calls} forwards for 3 requests of 60 tokens"


LONG_TEXT: dict[str, Any] = {"count": 60, "ignore_eos": True}


def test_requests_know_whether_somebody_reads_their_tokens_as_they_come(lm: LM) -> None:
    seen = []
    add = lm.engine.add

    def spy(request: Any) -> Any:
        seen.append(request)
        return add(request)

    lm.engine.add = spy  # type: ignore[method-assign]
    text(lm, "x = 1", count=2)
    lm.generate(PROMPTS[:2], "plain", max_new_tokens=2)
    for _ in lm.stream("x = 1", "plain", max_new_tokens=2):
        pass
    asyncio.run(lm.agenerate("x = 1", "plain", max_new_tokens=2))
    lm.engine.add = add  # type: ignore[method-assign]
    assert [request.streamed for request in seen] == [False, False, False, True, False]


def test_a_call_without_streaming_is_woken_once(lm: LM) -> None:
    woken: list[int] = []
    submit = lm.driver.submit

    def counted(requests: Any, deliver: Any, *more: Any) -> Any:
        def note(events: Any) -> None:
            woken.append(len(events))
            deliver(events)

        return submit(requests, note, *more)

    lm.driver.submit = counted  # type: ignore[method-assign]
    outs = lm.generate(PROMPTS[:2], "plain", max_new_tokens=30, ignore_eos=True)
    assert len(woken) == 1 and woken[0] > 60 and len(outs[0].tokens) == 30


def test_a_second_model_has_a_thread_of_its_own(lm: LM) -> None:
    other = tiny.lm()
    gate = Gate(wait_at=3)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(text, lm, PROMPTS[0], logits_processors=gate)
        gate.reached.wait(30)
        assert text(other, PROMPTS[0]) == text(tiny.lm(), PROMPTS[0])  # while the first one stands
        gate.open()
        future.result()


def test_a_gguf_model_can_be_called_from_threads(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs foretell[gguf]")
    pytest.importorskip("gguf", reason="needs the package gguf, to write files")
    path = tiny.gguf(tiny.llama(), tmp_path / "tiny.gguf")
    expected = [text(foretell.load(path), prompt) for prompt in PROMPTS]
    lm = foretell.load(path)

    def work(number: int) -> bool:
        order = [*range(number % 4, 4), *range(number % 4)]
        return all(text(lm, PROMPTS[i], METHODS[i % 3]) == expected[i] for i in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# --- who else uses the engine


def test_an_exclusive_user_stops_the_others(lm: LM) -> None:
    stream = lm.stream(PROMPTS[0], "plain", **LONG)
    next(stream)

    def look() -> tuple[int, int]:
        before = lm.models["target"].calls
        time.sleep(0.05)
        return before, lm.models["target"].calls

    before, after = lm.driver.run(look)
    assert before == after
    stream.close()


def test_an_exclusive_user_may_generate(lm: LM) -> None:
    """And requests of others go on meanwhile."""
    expected = text(tiny.lm(), PROMPTS[1])
    stream = lm.stream(PROMPTS[0], "plain", max_new_tokens=30)
    first = next(stream).text
    inside: list[Any] = []

    def work() -> None:
        inside.append(text(lm, PROMPTS[1]))
        opened = lm.stream(PROMPTS[1], "plain", max_new_tokens=20)
        inside.append(next(opened))
        inside.append(opened)

    lm.driver.run(work)
    answer, piece, opened = inside
    assert answer == expected
    assert piece.text + "".join(p.text for p in opened) == expected, "it goes on outside"
    rest = first + "".join(p.text for p in stream)
    assert rest == text(tiny.lm(), PROMPTS[0], count=30)


def test_measuring_and_saving_wait_for_no_step_to_be_open(lm: LM, tmp_path: Path) -> None:
    def work(number: int) -> Any:
        if number % 3 == 0:
            return lm.measure()
        if number % 3 == 1:
            return lm.save_stores(tmp_path / str(number))
        return text(lm, PROMPTS[number % 4], "token-recycling:nodes=6")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))
    assert idle(lm)


def test_a_processor_that_uses_its_own_model_fails_its_request(lm: LM) -> None:
    def ask(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lm.generate(PROMPTS[1], "plain", max_new_tokens=2)
        return scores

    with pytest.raises(BadConfig, match="from inside one of its own steps"):
        lm.generate(PROMPTS[0], "plain", logits_processors=ask)
    assert text(lm, PROMPTS[0]) == text(tiny.lm(), PROMPTS[0])


# --- failures and interruptions


def test_a_failing_step_wakes_everybody(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(wait_at=2)
    step = Engine.step

    def failing(engine: Engine) -> Any:
        events = step(engine)
        if len(engine.live) == 4:
            raise ArithmeticError("overflow\nand more")
        return events

    monkeypatch.setattr(Engine, "step", failing)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(lm.generate, PROMPTS[0], "plain", logits_processors=gate, **LONG)
        gate.reached.wait(30)
        second = pool.submit(lm.generate, PROMPTS[1:3], "plain", **LONG)
        third = pool.submit(lambda: list(lm.stream(PROMPTS[3], "plain", **LONG)))
        assert eventually(lambda: lm.driver._waiting == 2)
        gate.open()
        for future in (first, third):
            with pytest.raises(RequestFailed, match=r"a step failed: ArithmeticError: overflow"):
                future.result(30)
        for out in second.result(30):
            assert isinstance(out.error, RequestFailed) and out.finish_reason == "error"
    monkeypatch.undo()
    assert idle(lm) and text(lm, PROMPTS[0]) == text(tiny.lm(), PROMPTS[0])


def test_a_processor_that_exits_does_so_in_its_caller(lm: LM) -> None:
    def leave(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        lm.generate(PROMPTS[0], "plain", logits_processors=leave)
    assert idle(lm) and text(lm, PROMPTS[0]) == text(tiny.lm(), PROMPTS[0])


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals for one thread")
@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_caller_takes_its_requests_along(lm: LM, method: str) -> None:
    """And nobody else's."""
    gate = Gate(wait_at=5)
    stream = lm.stream(PROMPTS[1], "plain", max_new_tokens=40, ignore_eos=True)
    first = next(stream).text
    main = threading.get_ident()

    def interrupt() -> None:
        gate.reached.wait(30)
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
        gate.open()

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        lm.generate([PROMPTS[0], PROMPTS[2]], method, logits_processors=[[gate], None], **LONG)
    helper.join()
    assert len(lm.engine.live) <= 1
    rest = first + "".join(piece.text for piece in stream)
    assert rest == text(tiny.lm(), PROMPTS[1], count=40, ignore_eos=True)
    assert idle(lm) and text(lm, PROMPTS[0], method) == text(tiny.lm(), PROMPTS[0], method)


def test_an_interruption_inside_an_exclusive_user_ends_its_requests(
    lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lm.models["target"]
    run = type(model).run

    def interrupted(self: Any, *given: Any) -> Any:
        if self is model and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return run(self, *given)

    monkeypatch.setattr(type(model), "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.driver.run(lambda: lm.generate(PROMPTS[0], "plain"))
    assert idle(lm) and text(lm, PROMPTS[0]) == text(tiny.lm(), PROMPTS[0])


def test_a_stream_that_is_forgotten_ends(lm: LM) -> None:
    stream = lm.stream(PROMPTS[0], "plain", **LONG)
    next(stream)
    del stream
    gc.collect()
    assert idle(lm)


# --- event loops


def test_many_tasks_get_what_each_gets_alone(lm: LM) -> None:
    expected = [text(tiny.lm(), prompt) for prompt in PROMPTS]

    async def streamed(prompt: str) -> str:
        parts = []
        async for piece in lm.astream(prompt, "ngram:nodes=6", max_new_tokens=20):
            parts.append(piece.text)
        return "".join(parts)

    async def work() -> None:
        outs = await asyncio.gather(
            *(lm.agenerate(prompt, "plain", max_new_tokens=20) for prompt in PROMPTS)
        )
        assert [out.text for out in outs] == expected
        assert list(await asyncio.gather(*map(streamed, PROMPTS))) == expected
        outs = await lm.agenerate([*PROMPTS, [-1]], "plain", max_new_tokens=20)
        assert [out.text for out in outs] == [*expected, ""]
        assert isinstance(outs[-1].error, BadConfig)
        assert await lm.agenerate([]) == []
        with pytest.raises(BadConfig, match="prompt"):
            await lm.agenerate(5)
        with pytest.raises(BadConfig, match="n: streaming"):
            async for _ in lm.astream(PROMPTS[0], n=2):
                pass

    asyncio.run(work())
    assert idle(lm)


def test_the_event_loop_goes_on_while_a_step_stands(lm: LM) -> None:
    gate, other = Gate(wait_at=2), tiny.lm()

    async def work() -> None:
        task = asyncio.create_task(lm.agenerate(PROMPTS[0], "plain", logits_processors=gate))
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(lm.agenerate(PROMPTS[1], "plain", max_new_tokens=20))
        out = await other.agenerate(PROMPTS[1], "plain", max_new_tokens=20)
        assert not task.done() and not waiting.done()
        gate.open()
        assert (await waiting).text == out.text
        await task

    asyncio.run(work())


def test_a_cancelled_task_ends_its_requests(lm: LM) -> None:
    """While it waits for its first step, and in the middle."""
    gate = Gate(wait_at=3)

    async def work() -> None:
        running = asyncio.create_task(lm.agenerate(PROMPTS[:2], "plain", logits_processors=gate))
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(lm.agenerate(PROMPTS[1], "plain", **LONG))
        await asyncio.sleep(0.05)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert lm.engine.live, "cancelling waited for the step"
        gate.open()
        while not idle(lm):
            await asyncio.sleep(0.001)
        assert lm.models["target"].calls < 20

    asyncio.run(work())


def test_who_reads_slowly_gets_what_has_come_at_once(lm: LM) -> None:
    async def work() -> tuple[list[int], int]:
        tokens: list[int] = []
        pieces = 0
        async for piece in lm.astream(PROMPTS[0], "plain", max_new_tokens=20, ignore_eos=True):
            tokens += piece.tokens
            pieces += 1
            assert len(piece.tokens) == len(piece.draft) == len(piece.parts)
            while not pieces > 1 and lm.engine.live:
                await asyncio.sleep(0.001)
        return tokens, pieces

    tokens, pieces = asyncio.run(work())
    whole = lm.generate(PROMPTS[0], "plain", max_new_tokens=20, ignore_eos=True)
    assert tokens == whole.tokens and pieces <= 3


def test_a_closed_async_stream_ends_its_requests(lm: LM) -> None:
    async def work() -> None:
        stream: AsyncGenerator[Any, None] = lm.astream(PROMPTS[0], "plain", **LONG)
        await anext(stream)
        await stream.aclose()
        while not idle(lm):
            await asyncio.sleep(0.001)

        async def read() -> None:
            async for _ in lm.astream(PROMPTS[0], "plain", **LONG):
                await asyncio.sleep(3600)

        task = asyncio.create_task(read())
        while not lm.engine.live:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not idle(lm):
            await asyncio.sleep(0.001)

    asyncio.run(work())
    assert text(lm, PROMPTS[0]) == text(tiny.lm(), PROMPTS[0])


def test_a_loop_that_ends_early_leaves_nothing(lm: LM) -> None:
    async def work() -> None:
        stream = lm.astream(PROMPTS[0], "plain", **LONG)
        await anext(stream)
        asyncio.get_running_loop().stop()
        await asyncio.sleep(3600)

    loop = asyncio.new_event_loop()
    task = loop.create_task(work())
    loop.run_forever()
    assert not task.done()
    loop.close()
    gc.collect()
    assert eventually(lambda: idle(lm))


# --- threads of torch


def test_the_callers_number_of_threads_decides(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    step = Engine.step

    def noted(engine: Engine) -> Any:
        seen.append(torch.get_num_threads())
        return step(engine)

    monkeypatch.setattr(Engine, "step", noted)
    text(lm, PROMPTS[0], count=2)
    torch.set_num_threads(2)
    try:
        text(lm, PROMPTS[0], count=2)
    finally:
        torch.set_num_threads(1)
    text(lm, PROMPTS[0], count=2)
    assert seen[0] == 1 and seen[-1] == 1 and 2 in seen


def test_a_new_thread_does_not_get_a_number_lowered_for_a_moment() -> None:
    counts: list[int] = []
    torch.set_num_threads(3)
    try:
        with thread_counts.torch_threads(1):
            helper = threading.Thread(target=lambda: counts.append(thread_counts.threads_here()))
            helper.start()
            helper.join()
        assert counts == [3] and thread_counts.threads_here() == 3
    finally:
        torch.set_num_threads(1)


# --- the ends of things


def test_a_model_that_nobody_holds_is_freed() -> None:
    lm = tiny.lm()
    text(lm, PROMPTS[0])
    thread = lm.driver._thread
    assert thread is not None and thread.is_alive() and thread.daemon
    gone = weakref.ref(lm.models["target"])
    del lm
    gc.collect()
    thread.join(30)
    assert gone() is None and not thread.is_alive()


def script(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120
    )


def test_the_process_ends_in_the_middle_of_an_answer() -> None:
    code = (
        "from tests import tiny\n"
        "lm = tiny.lm()\n"
        "stream = lm.stream('a b', 'plain', max_new_tokens=100, ignore_eos=True)\n"
        "streams = [lm.stream(str(i), 'plain', max_new_tokens=100) for i in range(3)]\n"
        "print(next(stream).finish_reason, [next(s).finish_reason for s in streams])\n"
    )
    done = script(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "None [None, None, None]\n"


def _in_child(lm: LM, stream: Any, queue: Any) -> None:
    try:
        for _ in stream:  # pieces from before the fork
            pass
    except RequestFailed as error:
        queue.put(str(error))
    queue.put(text(lm, PROMPTS[1]))
    queue.put(idle(lm))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_after_a_fork_parent_and_child_go_on(lm: LM) -> None:
    expected = text(lm, PROMPTS[1])
    gate = Gate(wait_at=3)
    stream = lm.stream(PROMPTS[0], "plain", max_new_tokens=40, logits_processors=gate)
    first = next(stream).text
    gate.reached.wait(30)  # in the middle of a step
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(lm, stream, queue), daemon=True)
    child.start()
    assert "the process was forked" in queue.get(timeout=60)
    assert queue.get(timeout=60) == expected
    assert queue.get(timeout=60) is True
    child.join(60)
    assert child.exitcode == 0
    gate.open()
    rest = first + "".join(piece.text for piece in stream)
    assert rest == text(tiny.lm(), PROMPTS[0], count=40)


def test_a_missing_model_is_still_said_at_once() -> None:
    bare = tiny.lm(draft=False)
    with pytest.raises(Unsupported, match="draft"):
        bare.stream(PROMPTS[0], "draft")
    assert bare.driver._thread is None, "a thread for nothing"
