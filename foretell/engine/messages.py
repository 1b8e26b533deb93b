"""Handlers of the messages that a strategy yields to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from foretell.cache.policy import max_text_length
from foretell.core.context import Branch
from foretell.core.distribution import Sampler
from foretell.core.refusals import unmet_capability
from foretell.core.request import Event
from foretell.core.stats import commit_logprobs
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Call, Commit, Drop, Finish, Fork, Kept, Open, Tell, Together
from foretell.engine.live import Host, Live, OpenAsk, Task
from foretell.errors import PromptTooLong, Unsupported

CALLS = 8  # outside calls that run at once


def handle_message(engine: Host, live_request: Live, task: Task, message: Any) -> None:
    """Answers the task at once, or leaves it waiting for what it asked."""
    if isinstance(message, list):
        on_asks(engine, live_request, task, message)
    elif isinstance(message, Ask):
        on_asks(engine, live_request, task, [message])
        task.single = True
    else:
        HANDLERS[type(message)](engine, live_request, task, message)


def on_asks(engine: Host, live_request: Live, task: Task, asks: list[Ask]) -> None:
    task.single = False
    task.replies = [None] * len(asks)
    if not asks:
        task.wake_task([])
    for ask_index, ask in enumerate(asks):
        model = live_request.ctx.models[ask.model]
        tokens = live_request.ctx.branches[ask.branch].tokens
        assert tokens[-1] == ask.tree.tokens[0], "a tree hangs below the branch's last token"
        lacking = unmet_capability(model, ask)
        if lacking is not None:
            capability, refused_value = lacking
            name = f"{live_request.ctx.request.name} ({refused_value})"
            raise Unsupported.missing_capability(
                name, model.name, capability, "use another method or model"
            )
        end = len(tokens) + len(ask.tree)
        max_length = (
            max_text_length(live_request.ctx.request.policy, model)
            if ask.model == "target"
            else model.context
        )
        if end > max_length and len(tokens) + max(ask.tree.depths) > max_length:
            raise PromptTooLong(
                f"branch {ask.branch} has {len(tokens)} tokens and {model.name} holds "
                f"{model.context}, drafts included; shorten its prompt"
            )
        cache = engine.cache_of(live_request, ask.model, ask.branch)
        open_ask = OpenAsk(
            live_request, model, ask, task, ask_index, engine.forwards, cache.sync(tokens)
        )
        if cache.beside is not None:
            open_ask.after = states_first(engine, live_request, ask.branch)
        live_request.asks.append(open_ask)


def states_first(engine: Host, live_request: Live, branch: int) -> OpenAsk | None:
    """An ask that makes the target take in the text whose states or rows another model reads."""
    tokens = live_request.ctx.branches[branch].tokens
    cache = engine.cache_of(live_request, "target", branch)
    cache.settle(tokens)
    known_length = cache.length if cache.states is None else cache.states.reach
    missing_length = len(tokens) - 1 - min(known_length, len(tokens) - 1)
    if not missing_length and (cache.states is None or cache.states.none):
        return None
    ask = Ask(TokenTree(tokens[-1]), "target", branch, rows=())
    model = live_request.ctx.models["target"]
    open_ask = OpenAsk(live_request, model, ask, None, 0, engine.forwards, missing_length)
    live_request.asks.append(open_ask)
    return open_ask


def on_commit(engine: Host, live_request: Live, task: Task, commit: Commit) -> None:
    """Cuts the tokens at the first end, stop or limit, before anything learns of them."""
    ctx, request = live_request.ctx, live_request.ctx.request
    branch = ctx.branches[commit.branch]
    kept_count = 0
    reason = None
    for token in commit.tokens:
        branch.tokens.append(token)
        branch.output.append(token)
        kept_count += 1
        if branch.quiet:
            continue
        room = branch.limit - len(branch.tokens) + len(branch.output)
        reason = branch.sampler.reason(branch.output, room)
        if reason:
            break
    branch.reason = reason
    engine.admission.served[request.tenant] += kept_count
    if not branch.quiet:
        k = request.sampling.logprobs
        if k is not None:
            branch.logprobs += commit_logprobs(commit, kept_count, k)
        elapsed = time.perf_counter() - live_request.started
        ctx.stats.committed(commit, kept_count, len(branch.output), elapsed)
        stream_tokens(engine, live_request, commit, kept_count)
    task.wake_task(Kept(commit.tokens[:kept_count], reason))


def stream_tokens(engine: Host, live_request: Live, commit: Commit, kept_count: int) -> None:
    """Tells of new tokens. Of several texts it is known at the end only which is the answer."""
    texts = [branch for branch in live_request.ctx.branches.values() if not branch.quiet]
    if len(texts) > 1:
        return
    fresh_tokens = texts[0].output[
        live_request.streamed :
    ]  # other branches may just have been dropped
    live_request.streamed += len(fresh_tokens)
    sources = [*["target"] * (len(fresh_tokens) - kept_count), *commit.sources[:kept_count]]
    engine.events.append(Event(live_request.index, fresh_tokens, sources))


def on_tell(engine: Host, live_request: Live, task: Task, message: Tell) -> None:
    if [handle for handle, branch in live_request.ctx.branches.items() if not branch.quiet] == [
        message.branch
    ]:
        engine.events.append(
            Event(live_request.index, [], [], None, message.placed, message.length)
        )
    task.wake_task()


def on_open(engine: Host, live_request: Live, task: Task, message: Open) -> None:
    ctx = live_request.ctx
    request = ctx.request
    tokens = list(message.tokens)
    model = ctx.models[message.model]
    if not 0 < len(tokens) < model.context:
        raise PromptTooLong(
            f"a branch of {len(tokens)} tokens for {model.name}, which takes 1 to "
            f"{model.context - 1}; open it with another text"
        )
    limit = model.context
    if not message.quiet:
        limit = min(limit, len(tokens) + request.sampling.max_new_tokens)
    vocab, room = ctx.models["target"].vocab, limit - len(tokens)
    sampler = Sampler(request.sampling, tokens, engine.eos, vocab, request.text, room)
    task.wake_task(live_request.new_branch(Branch(tokens, [], sampler, limit, message.quiet)))


def on_fork(engine: Host, live_request: Live, task: Task, message: Fork) -> None:
    handles = []
    forked = live_request.ctx.branches[message.branch]
    branch_caches = {
        key[0]: cache for key, cache in live_request.caches.items() if key[1] == message.branch
    }
    for (
        name,
        cache,
    ) in branch_caches.items():  # else each twin would count all of the text as missing
        cache.settle(forked.tokens)
        if live_request.ctx.models[name].reads_segments and not live_request.ctx.models[name].feeds:
            cache.lend_rows(forked.tokens)
    for _ in range(message.n):
        twin_branch = forked.fork()
        twin_branch.quiet |= message.quiet
        handle = live_request.new_branch(twin_branch)
        handles.append(handle)
        twins = {(model, handle): cache.fork() for model, cache in branch_caches.items()}
        for twin in twins.values():  # what reads the target's cache reads its own branch's
            if twin.beside is not None:
                twin.beside = twins["target", handle]
        live_request.caches |= twins
    task.wake_task(handles)


def on_drop(engine: Host, live_request: Live, task: Task, message: Drop) -> None:
    del live_request.ctx.branches[message.branch]
    for key in [key for key in live_request.caches if key[1] == message.branch]:
        live_request.caches.pop(key).drop()
    task.wake_task()


def on_together(engine: Host, live_request: Live, task: Task, message: Together) -> None:
    task.children = [Task(steps, task, place) for place, steps in enumerate(message.steps)]
    task.results = [None] * len(task.children)
    task.running = len(task.children)
    task.first = message.first
    live_request.tasks += task.children
    if not task.children:
        task.wake_task([])


def on_call(engine: Host, live_request: Live, task: Task, message: Call) -> None:
    if engine.pool is None:
        engine.pool = ThreadPoolExecutor(CALLS, thread_name_prefix="foretell-call")
    task.call = engine.pool.submit(message.function)


def on_finish(engine: Host, live_request: Live, task: Task, message: Finish) -> None:
    live_request.result = message.branch
    live_request.reason = message.reason
    live_request.answers = message.answers


HANDLERS: dict[type, Callable[[Host, Live, Task, Any], None]] = {
    Commit: on_commit,
    Tell: on_tell,
    Open: on_open,
    Fork: on_fork,
    Drop: on_drop,
    Together: on_together,
    Call: on_call,
    Finish: on_finish,
}
