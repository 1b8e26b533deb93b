"""A stock, unpatched transformers decoder as a Model.

The model's own modules run on the packed row; attention is registered through transformers'
AttentionInterface and chosen for the time of a forward, so that the model stays usable by itself.
Where a family has the usual skeleton the loop over its layers is ours too (loop.py), which gives
hidden states, layer subsets and entry in the middle; others run whole. What a family really does is
measured when it is loaded, never looked up by its name, and one that cannot be right is refused
before the first forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from foretell.core.cache import Cache, Job, Layout
from foretell.core.model import STEP, Model, forest_attention
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply
from foretell.errors import ForetellError, Unsupported
from foretell.families.loop import Block, Loop, attending
from foretell.ops.threads import torch_threads
from foretell.runtimes.protocol import Executor

# Families whose packed forward the project's tests compare with transformers' own; others are
# tested when loaded.
PROVEN = frozenset(
    "llama qwen2 qwen3 mistral gemma2 gemma3_text phi3 olmo2 smollm3 granite stablelm starcoder2 cohere2 gpt_neox "
    "gpt2 opt glm4 mixtral qwen3_moe gpt_oss deepseek_v3 nanochat".split()
)


def _attend(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer: Any = module.layer_idx
    return forest_attention(layer, q[0], k[0], v[0], scaling, sliding_window, softcap, s_aux)[
        None
    ], None


@dataclass
class Look:
    """What a first forward shows: of each layer what it stores, its window, and how many positions
    its mask reaches.

    A reach counts up to `span`, the longest text; 0: the mask is neither causal nor a window, or is
    not handed over.
    """

    span: int
    layers: dict[int, tuple[tuple[int, int, int], int | None, int]] = field(default_factory=dict)


LOOK: ContextVar[Look] = ContextVar("foretell_look")


def _look(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Notes what the layer hands to attention; attends to nothing."""
    known = isinstance(attention_mask, torch.Tensor) and attention_mask.numel() == 1
    shape = (k.shape[1], k.shape[-1], v.shape[-1])
    layer: Any = module.layer_idx
    LOOK.get().layers[layer] = (shape, sliding_window, int(attention_mask) if known else 0)
    return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1]), None


def _reach(
    *_: Any, mask_function: Callable[..., torch.Tensor], device: Any = None, **__: Any
) -> torch.Tensor:
    """In place of the mask its reach, (1, 1, 1, 1). Looked for at the end of the longest text and
    in its middle.
    """
    span = LOOK.get().span
    columns, reach = torch.arange(span, device=device), span
    for row in (span - 1, span // 2):
        seen = mask_function(0, 0, torch.tensor(row, device=device), columns)
        reach = int(seen.sum()) if row == span - 1 else reach
        if not torch.equal(seen.expand(span), (columns <= row) & (columns > row - reach)):
            reach = 0
    return torch.full((1, 1, 1, 1), reach, device=device)


AttentionInterface.register("foretell", _attend)
AttentionMaskInterface.register("foretell", lambda *args, **kwargs: None)
AttentionInterface.register("foretell-look", _look)
AttentionMaskInterface.register("foretell-look", _reach)


class Decoder(Model):
    """A transformers causal language model. `caps`: `tree`, and `layers` (taps, subsets, entry)
    where the loop is ours.

    `accelerate(loop)` may replace the loop's blocks by faster equals; they are kept only if a probe
    agrees. Raises Unsupported, naming the reason, when the family cannot be computed right.
    """

    exact_bits = False  # whether a row's result depends on no other row, to the last bit

    def __init__(
        self,
        hf: PreTrainedModel,
        name: str = "model",
        accelerate: Callable[[Loop], list[Block] | None] | None = None,
    ):
        self.hf, self.name = hf.eval(), name
        self.config = hf.config.get_text_config()
        self.device, self.dtype = hf.device, hf.dtype
        self.loop: Loop | None = None
        self.executor: Executor | None = None  # what computes ordinary steps in torch's place
        self.narrow = any(
            p.dtype == torch.int8 for p in hf.parameters()
        )  # executors round activations in their ways
        self.fused = False  # whether no module of a layer is called
        head: Any = hf.get_output_embeddings()
        if head is None or hf.config.is_encoder_decoder:
            raise self._refuse("a decoder with a language model head")
        self.vocab, self.context = int(head.weight.shape[0]), self._context()
        self.probe = [(1 + 37 * i) % self.vocab for i in range(7)]
        self.keeps = "logits_to_keep" in inspect.signature(hf.forward).parameters
        try:
            with torch.inference_mode():
                self.layout, windows = self._layout()
                self.loop = self._loop(windows, accelerate)
                if self.config.model_type not in PROVEN:
                    self.self_test()
        except ForetellError:
            raise
        except Exception as error:  # a forward of a family nobody has looked at may raise anything
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise self._refuse(f"the usual forward of a decoder ({reason})") from error
        self.caps = frozenset({"tree", "rows"} | ({"layers"} if self.loop else set()))

    def _refuse(self, capability: str) -> Unsupported:
        model = f"{self.name} (family {self.config.model_type})"
        return Unsupported.missing(
            "foretell", model, capability, "use transformers' own generate for it"
        )

    def _attention(self, kind: str = "foretell") -> AbstractContextManager[None]:
        return attending(self.config, kind)

    def _context(self) -> int:
        limit = int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)
        rope = getattr(self.config, "rope_parameters", None) or {}
        original = getattr(self.config, "original_max_position_embeddings", None)
        for part in (rope, *rope.values()):  # one rotation, or one for each kind of layer
            if isinstance(part, dict) and part.get("rope_type") in ("dynamic", "longrope"):
                # Their frequencies depend on the longest request of a forward, so only the original
                # range is exact.
                limit = min(
                    limit, int(part.get("original_max_position_embeddings") or original or limit)
                )
        return limit

    def _whole(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits (n, V) from the model's own forward. A 4-D mask keeps transformers from building
        one.
        """
        skip = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        keep = {"logits_to_keep": rows} if rows is not None and self.keeps else {}
        out = self.hf(
            input_ids=ids, position_ids=positions, attention_mask=skip, use_cache=False, **keep
        )
        return out.logits[0] if rows is None or keep else out.logits[0, rows]  # type: ignore[no-any-return]

    def _layout(self) -> tuple[Layout, list[int | None]]:
        """What each layer stores, and its window; refuses where a layer does not leave all of
        attention to us.
        """
        look = Look(min(self.context, 1 << 20))
        token = LOOK.set(look)
        try:
            with self._attention("foretell-look"):
                self.hf(input_ids=torch.tensor([self.probe], device=self.device), use_cache=False)
        finally:
            LOOK.reset(token)
        count = max([int(self.config.num_hidden_layers), *(i + 1 for i in look.layers)])
        if missing := [str(i) for i in range(count) if i not in look.layers]:
            raise self._refuse(
                f"attention through transformers' interface in every layer, which layers "
                f"{', '.join(missing[:6])} do not use (recurrent, or of an older kind)"
            )
        shapes, windows, reaches = zip(*(look.layers[i] for i in range(count)), strict=True)
        for i, (window, reach) in enumerate(zip(windows, reaches, strict=True)):
            if not reach:
                raise self._refuse(f"a causal mask or a sliding window, and layer {i} has another")
            if reach != min(window or look.span, look.span):
                raise self._refuse(
                    f"to be told the window of {reach} positions, which layer {i} keeps to itself"
                )
        return shapes, list(windows)

    def _close(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        tolerance = (
            1e-4 if self.dtype in (torch.float32, torch.float64) and not self.narrow else 0.05
        )
        return bool(
            (ours.float() - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max()
        )

    def _loop(
        self, windows: list[int | None], accelerate: Callable[[Loop], list[Block] | None] | None
    ) -> Loop | None:
        """The loop if it gives the logits of the model's own forward, else None: then the model
        runs whole.
        """
        ids = torch.tensor([self.probe], device=self.device)
        positions = torch.arange(len(self.probe), device=self.device)[None]
        tree = TokenTree(self.probe[0]).chain(self.probe[1:])
        job, _ = self.cache().prepare(Ask(tree), self.probe[:1], len(tree))

        def agrees(loop: Loop) -> bool:
            h = loop.run(loop.embedded(ids), positions, range(len(loop.layers)), (), {})
            return self._close(loop.logits(h[0]), loop.reference)

        token = STEP.set([job])
        try:
            with self._attention():
                loop = Loop(
                    self.hf, windows, self.context, ids, lambda: self._whole(ids, positions)
                )
                if not agrees(loop):
                    return None
                stock, blocks = loop.blocks, accelerate(loop) if accelerate else None
                loop.blocks = blocks or stock
                if blocks and not agrees(loop):
                    loop.blocks = stock
                self.fused = loop.blocks is not stock
                return loop
        except (LookupError, AttributeError, TypeError):
            return None
        finally:
            STEP.reset(token)

    def use(self, make: Callable[[Loop, Layout, torch.dtype, int], Executor]) -> None:
        """Hands ordinary steps to another executor. Raises LookupError, with the reason, where it
        cannot have them.
        """
        if self.loop is None:
            raise LookupError("the loop over the layers of this family is its own")
        with self._attention():
            executor, answers = (
                make(self.loop, self.layout, self.dtype, self.vocab),
                list[torch.Tensor](),
            )
        # A tree it was not recorded with, behind rows of another forward: what was a constant then
        # shows now.
        tokens = torch.randint(
            self.vocab, (12,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        tree, before = TokenTree(tokens[5]).chain(tokens[6:9]).chain(tokens[9:11]), self.executor
        try:
            for self.executor in (None, executor):
                cache, done = self.cache(), False
                while not done:
                    job, done = cache.prepare(Ask(tree), tokens[:6], 3)
                    with torch.inference_mode():
                        logits = self.forward([job])[0].logits
                answers.append(logits)
        except Exception as error:  # a runtime may refuse a graph only when it compiles or runs it
            raise LookupError(
                f"it fails: {(str(error).splitlines() or [type(error).__name__])[0]}"
            ) from error
        finally:
            self.executor = before
        if not self._close(answers[1], answers[0]):
            raise LookupError("its logits differ from torch's by more than rounding")
        self.executor = executor

    def forward(self, jobs: Sequence[Job], taps: Sequence[int] = ()) -> list[Reply]:
        threads = self.asked or torch.get_num_threads()
        executor = self.executor
        computed = executor(jobs, threads, taps) if executor is not None else None
        if executor is None or computed is None:
            with torch_threads(threads):
                return super().forward(jobs, taps)
        self.calls += 1
        self.width = executor.size
        replies = []
        node = row = 0
        for job in jobs:
            job.cache.finish()
            last_node, last_row = node + len(job.tokens), row + len(job.rows)
            hidden = {tap: computed.hidden[tap][node:last_node] for tap in taps}
            logits = computed.logits[row:last_row]
            replies.append(Reply(logits, hidden, [r + job.first for r in job.rows]))
            node, row = last_node, last_row
        return replies

    def cache(self) -> Cache:
        return super().cache() if self.executor is None else self.executor.cache()

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        assert self.loop is not None, "a model that runs whole lacks the capability `layers`"
        return self.loop.embedded(torch.tensor(tokens, device=self.device))

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        hidden: dict[int, torch.Tensor] = {}
        with nullcontext() if self.fused else self._attention():
            if self.loop is None:
                return self._whole(ids, positions, rows.long()), hidden
            if first.states is None:
                h = self.loop.embedded(ids)
            else:
                h = torch.cat([job.states for job in STEP.get() if job.states is not None])[None]
            order = range(len(self.layout)) if first.layers is None else first.layers
            h = self.loop.run(h, positions, order, taps, hidden)[0]
        if not len(rows):
            return h.new_zeros(0, self.vocab), hidden
        every = all(job.rows == [*range(len(job.tokens))] for job in STEP.get())
        return self.loop.logits(h if every else h[rows]), hidden

    def self_test(self) -> None:
        """A tree behind a prompt in pieces must give the rows of its paths as the model alone
        computes them.
        """
        tree = TokenTree(self.probe[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        cache, done = self.cache(), False
        while not done:
            job, done = cache.prepare(Ask(tree), self.probe, 3)
            reply = self.forward([job])[0]
        for node, row in enumerate(reply.logits):
            ids = torch.tensor([self.probe + tree.words(node)], device=self.device)
            if not self._close(row, self.hf(input_ids=ids, use_cache=False).logits[0, -1]):
                raise self._refuse(
                    "a tree to give the rows of its paths, and a self-test found that it does not"
                )
