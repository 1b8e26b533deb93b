"""The branches of a request, and what its strategy and drafter may see of them."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from foretell.cache.policy import max_text_length
from foretell.core.distribution import Sampler
from foretell.core.random import Door, Rng
from foretell.core.stats import Stats

if TYPE_CHECKING:
    import numpy as np

    from foretell.core.model import Model
    from foretell.core.request import Request
    from foretell.core.stores import Stores
    from foretell.core.tree import TokenTree
    from foretell.speculation.costs import Costs

T = TypeVar("T")


@dataclass
class Branch:
    """A text of a request. `output` is what stands in `tokens` after the prompt."""

    tokens: list[int]
    output: list[int]
    sampler: Sampler
    limit: int  # of tokens in all
    quiet: bool = False
    reason: str | None = None  # why it ended
    logprobs: list[tuple[float | None, list[tuple[int, float]]]] = field(default_factory=list)

    def fork(self) -> Branch:
        twin = copy.copy(self)
        twin.tokens, twin.output = list(self.tokens), list(self.output)
        twin.logprobs = list(self.logprobs)
        return twin


class Shared(Protocol):
    """The part of an engine that all its requests share."""

    eos: tuple[int, ...]
    models: dict[str, Model]
    stores: Stores
    running: int  # requests that share forwards
    texts: int  # tokens of prompts in the target's last forward, while some are unfinished
    admission: Any  # engine.admission.Admission

    def costs_of(self, model: Model, *, jobs: int = 1) -> Costs: ...


class Context:
    """A branch of a request as its strategy and drafter see it."""

    def __init__(self, engine: Shared, request: Request, models: Mapping[str, Model] | None = None):
        models = engine.models if models is None else models
        target = models["target"]
        self.engine = engine
        self.request = request
        self.models = models
        self.priced = target  # whose forwards verify what is drafted
        prompt_length = len(request.prompt) + len(request.inputs.get("source", ()))
        self.stats = Stats(prompt_tokens=prompt_length)
        self.owner: Any = request.strategy  # whose stores `shared` gives
        self.uses: set[Any] = set()  # (tenant, owner) of what it has asked for
        # Hidden states of the target that its caches keep, for models that feed on them.
        model_names = {name for part in request.parts for name in part.models}
        self.kept_taps = tuple(sorted({tap for name in model_names for tap in models[name].feeds}))
        self.timed = False  # whether measured time may decide what is drafted
        self.branch = 0
        prompt = list(request.prompt)
        limit = min(
            len(prompt) + request.sampling.max_new_tokens, max_text_length(request.policy, target)
        )
        if request.room is not None:
            limit = min(limit, request.room.length)
        decode_text, max_output = request.text, limit - len(prompt)
        sampler = Sampler(
            request.sampling, prompt, engine.eos, target.vocab, decode_text, max_output
        )
        self.branches: dict[int, Branch] = {0: Branch(prompt, [], sampler, limit)}
        seed = request.sampling.seed
        self.repeats = seed is not None  # whether the same seed must give the same tokens again
        self.door: Door = request.rng or Rng(secrets.randbits(62) if seed is None else seed)
        self.rng = self.door

    # --- the branch; none of these lists may be changed

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.branches[self.branch].tokens

    @property
    def output(self) -> list[int]:
        return self.branches[self.branch].output

    @property
    def sampler(self) -> Sampler:
        return self.branches[self.branch].sampler

    @property
    def limit(self) -> int:
        """The longest that the text may become."""
        return self.branches[self.branch].limit

    @property
    def depth(self) -> int:
        """How deep a draft may be: one more token always follows it."""
        length = len(self.tokens)
        depth = self.limit - length - 1
        if self.request.policy is not None:
            # Drafts end where cached rows change, those of branches that mirror this one included.
            for branch in self.branches.values():
                length = len(branch.tokens)
                room = self.request.policy.room_of(length - 1, length - len(branch.output))
                depth = min(depth, room - 1)
        return depth

    def ends(self, tree: TokenTree, node: int) -> bool:
        """Whether the text ends with this node of a tree below it: nothing is asked after it."""
        return self.sampler.ends(tree, node, self.output)

    def on(self, branch: int) -> Context:
        """Returns the request seen from another branch; its draws are that branch's own."""
        view = copy.copy(self)
        view.branch = branch
        view.rng = self.door.at(branch)
        return view

    # --- what forwards take

    @property
    def costs(self) -> Costs:
        """Costs of forwards of this request alone."""
        return self.engine.costs_of(self.priced)

    def shares(self, tokens: int) -> np.ndarray:
        """Shares (tokens,) of a forward's seconds for this request, where all running ones have 1,
        2, ... tokens each, by the backend that computes so many together.
        """
        engine = self.engine
        costs = engine.costs_of(self.priced, jobs=engine.running)
        return costs.share(tokens, len(self.tokens), engine.running, engine.texts)

    # --- what is shared

    def scope_to(self, owner: Any) -> Context:
        """Returns the context of a part of the method, with shared stores under its config."""
        view = copy.copy(self)
        view.owner = owner
        return view

    def shared(self, make: Callable[[], T], name: str = "store") -> T:
        """Returns the store that all requests of this engine, tenant and config share."""
        stores, use = self.engine.stores, (self.request.tenant, self.owner)
        stores.touch(use)
        self.uses.add(use)
        key = (*use, name)
        if key not in stores:
            stores[key] = make()
        shared_store: T = stores[key]
        return shared_store
