"""What the engine does with each message that a strategy yields."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from foretell.cache.policy import longest
from foretell.core.context import Branch
from foretell.core.distribution import Sampler
from foretell.core.refusals import lacks
from foretell.core.request import Event
from foretell.core.stats import logprobs_of
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Call, Commit, Drop, Finish, Fork, Kept, Open, Tell, Together
from foretell.engine.live import Host, Live, OpenAsk, Task
from foretell.errors import PromptTooLong, Unsupported

CALLS = 8  # outside calls that run at once


def handle(engine: Host, live: Live, task: Task, message: Any) -> None:
    """Answers the task at once, or leaves it waiting for what it asked."""
    if isinstance(message, list):
        on_asks(engine, live, task, message)
    elif isinstance(message, Ask):
        on_asks(engine, live, task, [message])
        task.single = True
    else:
        HANDLERS[type(message)](engine, live, task, message)


def on_asks(engine: Host, live: Live, task: Task, asks: list[Ask]) -> None:
    task.single = False
    task.replies = [None] * len(asks)
    if not asks:
        task.wake([])
    for place, ask in enumerate(asks):
        model = live.ctx.models[ask.model]
        tokens = live.ctx.branches[ask.branch].tokens
        assert tokens[-1] == ask.tree.tokens[0], "a tree hangs below the branch's last token"
        lacking = lacks(model, ask)
        if lacking is not None:
            what, given = lacking
            name = f"{live.ctx.request.name} ({given})"
            raise Unsupported.missing(name, model.name, what, "use another method or model")
        end = len(tokens) + len(ask.tree)
        most = longest(live.ctx.request.policy, model) if ask.model == "target" else model.context
        if end > most and len(tokens) + max(ask.tree.depths) > most:
            raise PromptTooLong(
                f"branch {ask.branch} has {len(tokens)} tokens and {model.name} holds "
                f"{model.context}, drafts included; shorten its prompt"
            )
        cache = engine.cache_of(live, ask.model, ask.branch)
        entry = OpenAsk(live, model, ask, task, place, engine.forwards, cache.sync(tokens))
        if cache.beside is not None:
            entry.after = states_first(engine, live, ask.branch)
        live.asks.append(entry)


def states_first(engine: Host, live: Live, branch: int) -> OpenAsk | None:
    """An ask that makes the target take in the text whose states or rows another model reads."""
    tokens = live.ctx.branches[branch].tokens
    cache = engine.cache_of(live, "target", branch)
    cache.settle(tokens)
    known = cache.length if cache.states is None else cache.states.reach
    lacking = len(tokens) - 1 - min(known, len(tokens) - 1)
    if not lacking and (cache.states is None or cache.states.none):
        return None
    ask = Ask(TokenTree(tokens[-1]), "target", branch, rows=())
    model = live.ctx.models["target"]
    entry = OpenAsk(live, model, ask, None, 0, engine.forwards, lacking)
    live.asks.append(entry)
    return entry


def on_commit(engine: Host, live: Live, task: Task, commit: Commit) -> None:
    """Cuts the tokens at the first end, stop or limit, before anything learns of them."""
    ctx, request = live.ctx, live.ctx.request
    branch = ctx.branches[commit.branch]
    kept = 0
    reason = None
    for token in commit.tokens:
        branch.tokens.append(token)
        branch.output.append(token)
        kept += 1
        if branch.quiet:
            continue
        room = branch.limit - len(branch.tokens) + len(branch.output)
        reason = branch.sampler.reason(branch.output, room)
        if reason:
            break
    branch.reason = reason
    engine.admission.served[request.tenant] += kept
    if not branch.quiet:
        k = request.sampling.logprobs
        if k is not None:
            branch.logprobs += logprobs_of(commit, kept, k)
        elapsed = time.perf_counter() - live.started
        ctx.stats.committed(commit, kept, len(branch.output), elapsed)
        stream(engine, live, commit, kept)
    task.wake(Kept(commit.tokens[:kept], reason))


def stream(engine: Host, live: Live, commit: Commit, kept: int) -> None:
    """Tells of new tokens. Of several texts it is known at the end only which is the answer."""
    texts = [branch for branch in live.ctx.branches.values() if not branch.quiet]
    if len(texts) > 1:
        return
    fresh = texts[0].output[live.streamed :]  # other branches may just have been dropped
    live.streamed += len(fresh)
    sources = [*["target"] * (len(fresh) - kept), *commit.sources[:kept]]
    engine.events.append(Event(live.index, fresh, sources))


def on_tell(engine: Host, live: Live, task: Task, message: Tell) -> None:
    if [handle for handle, one in live.ctx.branches.items() if not one.quiet] == [message.branch]:
        engine.events.append(Event(live.index, [], [], None, message.placed, message.length))
    task.wake()


def on_open(engine: Host, live: Live, task: Task, message: Open) -> None:
    ctx = live.ctx
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
    task.wake(live.new_branch(Branch(tokens, [], sampler, limit, message.quiet)))


def on_fork(engine: Host, live: Live, task: Task, message: Fork) -> None:
    handles = []
    forked = live.ctx.branches[message.branch]
    held = {key[0]: cache for key, cache in live.caches.items() if key[1] == message.branch}
    for name, cache in held.items():  # else each twin would count all of the text as missing
        cache.settle(forked.tokens)
        if live.ctx.models[name].reads_segments and not live.ctx.models[name].feeds:
            cache.lend(forked.tokens)
    for _ in range(message.n):
        twin_branch = forked.fork()
        twin_branch.quiet |= message.quiet
        handle = live.new_branch(twin_branch)
        handles.append(handle)
        twins = {(model, handle): cache.fork() for model, cache in held.items()}
        for twin in twins.values():  # what reads the target's cache reads its own branch's
            if twin.beside is not None:
                twin.beside = twins["target", handle]
        live.caches |= twins
    task.wake(handles)


def on_drop(engine: Host, live: Live, task: Task, message: Drop) -> None:
    del live.ctx.branches[message.branch]
    for key in [key for key in live.caches if key[1] == message.branch]:
        live.caches.pop(key).drop()
    task.wake()


def on_together(engine: Host, live: Live, task: Task, message: Together) -> None:
    task.children = [Task(steps, task, place) for place, steps in enumerate(message.steps)]
    task.results = [None] * len(task.children)
    task.running = len(task.children)
    task.first = message.first
    live.tasks += task.children
    if not task.children:
        task.wake([])


def on_call(engine: Host, live: Live, task: Task, message: Call) -> None:
    if engine.pool is None:
        engine.pool = ThreadPoolExecutor(CALLS, thread_name_prefix="foretell-call")
    task.call = engine.pool.submit(message.function)


def on_finish(engine: Host, live: Live, task: Task, message: Finish) -> None:
    live.result = message.branch
    live.reason = message.reason
    live.answers = message.answers


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
