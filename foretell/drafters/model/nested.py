"""A draft model whose own text is sped up by a drafter: speculation within a draft.

What the inner drafter proposes is verified by the draft model's rows with an exact rule, residual
included. So the tokens that come out have the draft model's own distribution, which is the
distribution that each of them names when the target verifies it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from foretell.core.context import Context
from foretell.core.distribution import Sampler, Target
from foretell.core.drafter import Drafter, Drafting, Feedback
from foretell.core.random import Door
from foretell.core.tree import Law, TokenTree
from foretell.core.tree_building import plant_tree
from foretell.core.types import Ask, Call, Message, Reply, Together
from foretell.drafters.model.reader import DraftReader
from foretell.errors import BadConfig, Unsupported
from foretell.speculation.draft_size import sizes_for
from foretell.speculation.stopwatch import Stopwatch
from foretell.verification.acceptance import verify_by_default

R = TypeVar("R")
T = TypeVar("T")


class NumberedDoor:
    """A door that numbers the draws of a step: a draft has one position, whatever it decides.

    So a token that is drafted once more, after a refusal, is drawn anew.
    """

    def __init__(self, door: Door):
        self.door = door
        self.begin_step(0)

    def begin_step(self, position: int) -> None:
        """A new step, after `position` tokens of output."""
        self.position = position
        self.count = 0

    def _next_draw(self) -> tuple[str, int, int]:
        self.count += 1
        return "draft", self.position, self.count

    def sample(self, p: torch.Tensor, purpose: str, position: int, index: int = 0) -> int:
        return self.door.sample(p, *self._next_draw())

    def accept(self, chance: float, purpose: str, position: int, index: int = 0) -> bool:
        return self.door.accept(chance, *self._next_draw())

    def gumbel(self, size: int, position: int, index: int = 0) -> torch.Tensor:
        _, position, index = self._next_draw()
        return self.door.gumbel(size, position, index)

    def at(self, branch: int) -> NumberedDoor:
        return NumberedDoor(self.door.at(branch))


class Ahead(Context):
    """The context of an inner drafter: its text is the branch's and what is drafted after it.

    A copy of the drafter's state still refers to the same context, models and shared stores.
    """

    def __init__(self, ctx: Context, owner: Any, model: str):
        self.__dict__.update(ctx.__dict__)
        self.behind = ctx
        self.owner = (ctx.owner, owner)
        self.priced = ctx.models[model]
        self.branches = {ctx.branch: ctx.branches[ctx.branch].fork()}
        self.numbered = NumberedDoor(ctx.rng)
        self.rng = self.numbered
        self.uncopied: dict[int, Any] = {}  # by its id
        if isinstance(ctx, Ahead):
            self.uncopied = ctx.uncopied
        for part in (ctx.engine, ctx.request, *ctx.models.values()):
            self.uncopied[id(part)] = part

    def __deepcopy__(self, memo: dict[int, Any]) -> Ahead:
        return self

    def scope_to(self, owner: Any) -> Context:
        """Keeps what is learnt of the draft model apart from what is learnt of the target."""
        return super().scope_to((self.owner, owner))

    def shared(self, make: Callable[[], T], name: str = "store") -> T:
        shared_store = super().shared(make, name)
        self.uncopied[id(shared_store)] = shared_store
        for store_part in getattr(shared_store, "__dict__", {}).values():
            self.uncopied[id(store_part)] = store_part
        return shared_store

    def copy_state(self, state: T) -> T:
        """A copy of a drafter's state, which may read tokens that the text will not have."""
        return copy.deepcopy(state, dict(self.uncopied))

    def return_to_text(self, count: int) -> None:
        """Goes back to the branch's text, after which `count` tokens may be drafted."""
        branch = self.branches[self.branch]
        branch.tokens[:] = self.behind.tokens
        branch.output[:] = self.behind.output
        branch.limit = len(branch.tokens) + count
        self.numbered.begin_step(len(branch.output))

    def extend_text(self, tokens: Sequence[int]) -> None:
        """Goes on after these tokens."""
        branch = self.branches[self.branch]
        branch.tokens += tokens
        branch.output += tokens


class Recorded(Target):
    """A target that remembers the distributions it gave."""

    def __init__(
        self, rows: torch.Tensor, sampler: Sampler, output: Sequence[int], tree: TokenTree
    ):
        super().__init__(rows, sampler, output, tree)
        self.known: dict[int, torch.Tensor] = {}

    def p(self, node: int) -> torch.Tensor:
        if node not in self.known:
            self.known[node] = super().p(node)
        return self.known[node]

    def law_of_token(self, node: int, token: int) -> tuple[Law | None, float]:
        """The distribution of the token after `node`, None where none is drawn, and the token's
        probability.
        """
        if not self.sampler.greedy:
            p = self.p(node)
            return Law(p), float(p[token])
        scores = self.sampler.scores(self.rows[node], self.path(node))
        return None, float((scores[token] - scores.logsumexp(-1)).exp())


class Nested:
    """The draft model `model` with the drafter that speeds it up, in one request.

    `size`: nodes of an inner draft, 0: as many as pay. `name`: of the method, in errors and as the
    source of its tokens.
    """

    def __init__(self, ctx: Context, name: str, model: str, inner: Drafter, size: int = 0):
        self.name = name
        self.model = model
        self.inner = inner
        self.reader = DraftReader(ctx, model)
        for need in {*inner.needs} - self.reader.model.caps:
            cure = "choose another inner drafter or draft model"
            capability = f"the capability {need!r}"
            raise Unsupported.missing_capability(
                f"{name}:inner", self.reader.model.name, capability, cure
            )
        self.view = Ahead(ctx, inner, model)
        # No clock decides what is drawn; the walk's tokens are the same whatever is proposed.
        self.view.timed = not size and (ctx.sampler.greedy or not inner.draws)
        self.state = inner.start(self.view)
        self.sizes = sizes_for(self.view, size, inner)

    def draft_chain(self, ctx: Context, length: int) -> Drafting:
        """A chain of `length` tokens, shorter only after an end, drawn from the draft model."""
        tree = TokenTree(ctx.tokens[-1])
        if not self.reader.can_read(ctx.tokens):
            return tree
        length = min(length, self.reader.max_depth(ctx))
        view = self.view
        view.return_to_text(length)
        state = self.state
        node = 0
        while node < length:
            proposal = TokenTree(view.tokens[-1])
            asks_inner = view.depth > 0
            if asks_inner:
                proposal = yield from self._propose_inner(state, tree)
            reply = yield Ask(
                self._hang_below(tree, proposal),
                self.model,
                ctx.branch,
                rows=range(node, node + len(proposal)),
            )
            rows = torch.stack(self.reader.resized_rows(reply))
            target = Recorded(rows, view.sampler, view.output, proposal)
            outcome = verify_by_default(proposal, target, view.rng, len(view.output))
            if asks_inner:
                self.sizes.observe(outcome)
            tokens = [proposal.tokens[proposal_node] for proposal_node in outcome.path]
            tokens += [] if outcome.token is None else [outcome.token]
            for proposal_node, token in zip([0, *outcome.path], tokens, strict=False):
                law, probability = target.law_of_token(proposal_node, token)
                value = tree.values[node] * probability
                node = tree.add(node, token, law, value, self.name)
            view.extend_text(tokens)
            if node == length or ctx.ends(tree, node):
                break
            if state is self.state:
                state = view.copy_state(state)
            nodes = list(range(len(proposal)))
            verified_reply = replace(reply, logits=rows, nodes=nodes, new=[])
            self.inner.observe(view, state, Feedback(proposal, verified_reply, outcome, tokens))
        return tree

    def observe(self, ctx: Context, step: Feedback) -> None:
        """Takes in the target's verdict: the inner drafter learns the verified text."""
        self.view.return_to_text(0)
        self.inner.observe(self.view, self.state, step)

    def _propose_inner(self, state: Any, drafted: TokenTree) -> Drafting:
        """The inner drafter's proposal after the tokens that are drafted."""
        view = self.view
        budget = self.sizes.node_budget()
        if budget <= 1:
            return TokenTree(view.tokens[-1])
        stopwatch = Stopwatch()
        steps = self.inner.steps(view, state, budget)
        proposal = yield from stopwatch.time_messages(self._relay_steps(steps, drafted))
        return self.sizes.fit_tree(proposal, stopwatch.seconds)

    # --- the inner drafter's asks, which hang below what is drafted so far

    def _hang_below(self, drafted: TokenTree, tree: TokenTree) -> TokenTree:
        """`tree` below a drafted chain, whose last token is its root.

        A token that the draft model does not know is never accepted: its row is nobody's.
        """
        drafted_count = len(drafted) - 1
        vocab = self.reader.model.vocab
        tokens = [token if token < vocab else 0 for token in tree.tokens[1:]]
        parents = [*range(drafted_count), *(parent + drafted_count for parent in tree.parents[1:])]
        values = [1.0] * len(parents)
        return plant_tree(drafted.tokens[0], parents, [*drafted.tokens[1:], *tokens], values, "")

    def _relay_steps(
        self, steps: Generator[Message, Any, R], drafted: TokenTree
    ) -> Generator[Message, Any, R]:
        """The messages of an inner drafter as they are for the engine, and back."""
        answer: Any = None
        pending_error: Exception | None = None
        try:
            while True:
                try:
                    message = steps.throw(pending_error) if pending_error else steps.send(answer)
                except StopIteration as end:
                    result: R = end.value
                    return result
                answer = pending_error = None
                try:
                    answer = yield from self._relay_message(message, drafted)
                except Exception as raised:  # of a call, say: the drafter may go on
                    pending_error = raised
        finally:
            steps.close()

    def _relay_message(self, message: Message, drafted: TokenTree) -> Generator[Message, Any, Any]:
        if isinstance(message, Ask):
            reply = yield self._hang_ask(message, drafted)
            return self._shift_reply(message, reply, len(drafted) - 1)
        if isinstance(message, list):
            replies = yield [self._hang_ask(ask, drafted) for ask in message]
            pairs = zip(message, replies, strict=True)
            return [self._shift_reply(ask, reply, len(drafted) - 1) for ask, reply in pairs]
        if isinstance(message, Together):
            steps = [self._relay_steps(child, drafted) for child in message.steps]
            return (yield Together(steps, message.first))
        if isinstance(message, Call):
            return (yield message)
        raise BadConfig(
            f"{self.name}:inner: {type(self.inner).__name__} writes a text of its own, which "
            "cannot be taken back when the target refuses a draft; choose another inner drafter"
        )

    def _hang_ask(self, ask: Ask, drafted: TokenTree) -> Ask:
        model = self.model if ask.model == "target" else ask.model
        requested_rows = range(len(ask.tree)) if ask.rows is None else ask.rows
        rows = [row + len(drafted) - 1 for row in requested_rows]
        return replace(ask, tree=self._hang_below(drafted, ask.tree), model=model, rows=rows)

    def _shift_reply(self, ask: Ask, reply: Reply, count: int) -> Reply:
        logits = reply.logits
        if ask.model == "target":
            rows = self.reader.resized_rows(reply)
            logits = torch.stack(rows) if rows else logits
        nodes = [node - count for node in reply.nodes]
        new_nodes = [node - count for node in reply.new]
        return replace(reply, logits=logits, nodes=nodes, new=new_nodes)
