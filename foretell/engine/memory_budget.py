"""Budgets of memory: how much a request may draft so that everything fits into some bytes.

After SpecMemo (arXiv:2506.01986): memory is worked out before it is taken, caches
have the length that a request needs from the beginning, and drafts give way first: a request gets
the most nodes a step that fit, then none, and only then a shorter text. Neither other requests nor
a clock have a say in it, so a seed gives its tokens again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretell.constraints.asking import inner_method
from foretell.core.memory_size import Demand, Room, compute_footprint, find_room, sizes_of
from foretell.core.source import Direct
from foretell.engine.scheduler import CHUNK
from foretell.errors import BadConfig, Unsupported
from foretell.speculation.draft_size import LIMIT
from foretell.speculation.fitting import FORCED_TOKENS
from foretell.speculation.strategy import Speculative

if TYPE_CHECKING:
    from foretell.core.model import Model
    from foretell.core.request import Request


def room_for(engine: Any, request: Request, models: Mapping[str, Model]) -> Room | None:
    """Room that the engine's budget leaves a request; None: it has no budget.

    Raises BadConfig where the budget is too small for it, with what would do, and Unsupported where
    what it takes cannot be told beforehand.
    """
    budget = engine.admission.budget
    if budget is None:
        return None
    brought = [name for part in request.parts for name in engine.brought.get(part, ())]
    names = drafting_models(request, models, brought)
    sizes = {name: sizes_of(models[name]) for name in ("target", *names)}
    drafts = [sizes[name] for name in names]
    fixed = reserved_bytes(engine)
    share = (budget - fixed) // (engine.admission.requests or 1)
    granted_room = find_room(sizes["target"], drafts, demand_of(request, models["target"]), share)
    if isinstance(granted_room, Room):
        return granted_room
    required_bytes = fixed + granted_room * (engine.admission.requests or 1)
    raise BadConfig(
        f"budget={budget}: too small for a prompt of {len(request.prompt)} tokens and one more; "
        f"it takes {required_bytes} bytes, weights included"
    )


def drafting_models(
    request: Request, models: Mapping[str, Model], brought: Sequence[str] = ()
) -> list[str]:
    """The models that a request asks for drafts. Raises Unsupported where its memory is not that of
    one text with rows of its own.

    `brought`: those that its method made of them.
    """
    strategy: Any = request.strategy
    target = models["target"]
    for name in ("target", *strategy.models, *brought):
        is_known = not (models[name].copies_rows or models[name].learns)
        if is_known and name not in brought:
            cache = models[name].cache()
            is_known = cache.any_length
            cache.drop()
        if not is_known:
            requirement = "caches of any length that stand alone, and weights that stay as they are"
            cure = "load it with backend='torch', use another method, or leave the budget out"
            raise Unsupported.missing_capability("a budget", models[name].name, requirement, cure)
    direct = request.source is None or isinstance(request.source, Direct)
    if not (strategy.one_text and direct and request.policy is None):
        requirement = "a method that works on one text alone, with its own rows"
        cure = "use another method or leave the budget out"
        raise Unsupported.missing_capability(
            f"{request.name} within a budget", target.name, requirement, cure
        )
    return list(strategy.models)


def demand_of(request: Request, target: Model) -> Demand:
    strategy = inner_method(request.strategy)
    sampling = request.sampling
    nodes, is_drawn, only_chains = 0, False, True
    if isinstance(strategy, Speculative):
        nodes = strategy.nodes or LIMIT
        is_drawn = strategy.drafter.draws and sampling.temperature > 0
        only_chains = "tree" not in strategy.needs
    prompt = len(request.prompt)
    length = min(prompt + max(1, sampling.max_new_tokens), target.context)
    forced = FORCED_TOKENS if nodes and sampling.constraint is not None else 0
    canvases = getattr(strategy, "canvases", 0)
    return Demand(
        prompt, length, nodes, is_drawn, only_chains and not forced, forced, CHUNK, canvases
    )


def reserved_bytes(engine: Any) -> int:
    """Bytes that are taken whatever runs: weights, and what is kept of earlier texts."""
    models = {id(model): model for model in engine.models.values()}
    for brought in engine.brought.values():
        models |= {id(model): model for model in brought.values()}
    kept_bytes = 0 if engine.reuse is None else engine.reuse.tree.limit
    return kept_bytes + sum(model.weight_bytes for model in models.values())


def min_budget(engine: Any) -> int:
    """Bytes below which nothing can run: the weights and a plain step of two tokens."""
    target = sizes_of(engine.models["target"])
    step = compute_footprint(target, (), Demand(prompt=1, length=2, nodes=0))
    return reserved_bytes(engine) + step.total - step.weights
