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
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from foretell.cache.buffers import Layout
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import STEP, Computed, Model, forest_attention
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import ForetellError, Unsupported, first_line
from foretell.models.decoder.adapted import adapted
from foretell.models.decoder.layered import run_layers
from foretell.models.decoder.learning import Learning, learning_decoder
from foretell.models.decoder.loop import Block, Loop, attending
from foretell.models.decoder.packed import (
    WHOLE_NUMBERS,
    PackedLinear,
    as_near,
    held_bytes,
    unrounded,
)
from foretell.models.decoder.parallel import LayerParallel
from foretell.models.decoder.probing import PROBE, AttentionCall, AttentionProbe, alike, check_calls
from foretell.models.decoder.retrieving import Retrieving
from foretell.models.decoder.skipping import skipping
from foretell.models.decoder.turning import Move, Turn, move_of, turn_of
from foretell.models.executor import Executor, interleave
from foretell.ops.threads import torch_threads

if TYPE_CHECKING:
    from foretell.core.request import Request

# Families whose packed forward the project's tests compare with transformers' own; others are
# tested when loaded.
PROVEN = frozenset(
    "llama qwen2 qwen3 mistral gemma2 gemma3_text phi3 olmo2 smollm3 granite stablelm starcoder2 "
    "cohere2 gpt_neox gpt2 opt glm4 mixtral qwen3_moe gpt_oss deepseek_v3 nanochat".split()
)
UNLIMITED = 1 << 20  # positions of a model that names no limit
Accelerate = Callable[[Loop], list[Block] | None]
Make = Callable[[Loop, Layout, torch.dtype, int], Executor]


def _attend(
    module: nn.Module,
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
    out = forest_attention(layer, q[0], k[0], v[0], scaling, sliding_window, softcap, s_aux)
    return out[None], None


AttentionInterface.register("foretell", _attend)
AttentionMaskInterface.register("foretell", lambda *args, **kwargs: None)


def context_of(config: Any) -> int:
    """Positions that a model with this configuration can tell apart, all of them exactly."""
    limit = int(getattr(config, "max_position_embeddings", None) or UNLIMITED)
    original = getattr(config, "original_max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # one rotation, or one for each kind of layer
        if isinstance(part, dict) and part.get("rope_type") in ("dynamic", "longrope"):
            # Their frequencies depend on the longest request of a forward, so only the original
            # range is exact.
            exact = part.get("original_max_position_embeddings") or original or limit
            limit = min(limit, int(exact))
    return limit


class Decoder(Model):
    """A transformers causal language model. `caps`: `tree`, and `layers` (taps, subsets, entry)
    where the loop is ours.

    `accelerate(loop)` may replace the loop's blocks by faster equals; they are kept only if a probe
    agrees. `loop_refused` and `blocks_refused` say why the loop is not ours and why the faster
    blocks are not used; None: there is no reason, or nobody asked. Raises Unsupported, naming the
    reason, when the family cannot be computed right.
    """

    layout: Layout  # type: ignore[assignment]  # every layer keeps rows
    cache_type: type[Cache] = Cache  # of the caches that torch computes on
    skips = True  # whether cache policies may let tokens leave out layers

    def __init__(
        self, hf: PreTrainedModel, name: str = "model", accelerate: Accelerate | None = None
    ):
        self.hf = hf.eval()
        self.name = name
        self.config = hf.config.get_text_config()
        self.device = hf.device
        self.dtype = hf.dtype
        self.executor: Executor | None = None  # computes ordinary steps in torch's place
        self.loop: Loop | None = None
        self.fused = False  # whether no module of a layer is called
        self.loop_refused: str | None = None
        self.blocks_refused: str | None = None
        # The format of linear layers of 8 or 4 bits, else None.
        formats = {m.packed.format for m in hf.modules() if isinstance(m, PackedLinear)}
        self.matrices = next((name for name in reversed(WHOLE_NUMBERS) if name in formats), None)
        # Whether it has some: executors round their activations in different ways.
        self.narrow = self.matrices is not None
        head = self._find_head()
        if head is None or hf.config.is_encoder_decoder:
            raise self._refusal(f"a decoder with {self._head_in_words}")
        self.head = head
        self.vocab, self.row_size = self._sizes()
        self.known_ids = self.vocab  # ids that can be embedded; a view may have more
        self.context = context_of(self.config)
        self.probe_ids = [(1 + 37 * i) % self.vocab for i in range(7)]
        self.takes_rows = "logits_to_keep" in inspect.signature(hf.forward).parameters
        try:
            with torch.inference_mode():
                self.layout, windows = self._layout()
                self.loop = self._loop(windows, accelerate)
                if self.config.model_type not in PROVEN:
                    self.self_test()
        except ForetellError:
            raise
        except Exception as error:  # the forward of an unknown family may raise anything
            raise self._refusal(f"the usual forward of a decoder ({first_line(error)})") from error
        if self.loop is not None:
            self.caps = Model.caps | {"layers", "taps"} | ({"parts"} if self.loop.halved else set())

    # --- what a model with another head does in its own way

    _head_in_words = "a language model head"

    def _find_head(self) -> Any:
        return self.hf.get_output_embeddings()

    def _sizes(self) -> tuple[int, int]:
        """How many token ids there are, and how many numbers a row has."""
        vocab = getattr(self.head, "out_features", 0) or int(self.head.weight.shape[0])
        return vocab, vocab

    def _stock_rows(
        self, ids: torch.Tensor, rows: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor:
        """Rows (n, V) of ids (1, n), or (R, V) of these `rows`, by the model's own forward."""
        selects = rows is not None and self.takes_rows
        if selects:
            inputs["logits_to_keep"] = rows
        logits: torch.Tensor = self.hf(input_ids=ids, use_cache=False, **inputs).logits[0]
        return logits if rows is None or selects else logits[rows]

    # --- what a family does, measured

    def _refusal(self, capability: str) -> Unsupported:
        model = f"{self.name} (family {self.config.model_type})"
        cure = "use transformers' own generate for it"
        return Unsupported.missing("foretell", model, capability, cure)

    def _attention(self, kind: str = "foretell") -> AbstractContextManager[None]:
        return attending(self.config, kind)

    def _layout(self) -> tuple[Layout, list[int | None]]:
        """What each layer stores, and its window.

        Raises Unsupported where a layer does not leave all of attention to us.
        """
        calls = self._attention_calls()
        return tuple(call.shape for call in calls.values()), [c.window for c in calls.values()]

    def _attention_calls(self, others: Collection[int] = ()) -> dict[int, AttentionCall]:
        """What each layer hands to attention, in order; these `others` need not hand it anything.

        Raises Unsupported as `_layout` does.
        """
        probe = AttentionProbe(min(self.context, UNLIMITED))
        token = PROBE.set(probe)
        try:
            with self._attention("foretell-probe"):
                ids = torch.tensor([self.probe_ids], device=self.device)
                self.hf(input_ids=ids, use_cache=False)
        finally:
            PROBE.reset(token)
        count = max([int(self.config.num_hidden_layers), *(i + 1 for i in probe.calls)])
        missing = [str(i) for i in range(count) if i not in probe.calls and i not in others]
        if missing:
            raise self._refusal(
                f"attention through transformers' interface in every layer, which layers "
                f"{', '.join(missing[:6])} do not use (recurrent, or of an older kind)"
            )
        calls = {i: probe.calls[i] for i in sorted(probe.calls)}
        try:
            check_calls(probe.span, calls)
        except LookupError as error:
            raise self._refusal(str(error)) from error
        return calls

    def agrees(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Whether two computations of the same rows differ by rounding only."""
        wide = self.dtype in (torch.float32, torch.float64) and not self.narrow
        if self.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            wide = False  # torch was told that products in float32 may round as coarser ones
        return alike(ours.float(), theirs.float(), wide)

    def _loop(self, windows: list[int | None], accelerate: Accelerate | None) -> Loop | None:
        """The loop if it gives the rows of the model's own forward, else None: then the model runs
        whole, and `loop_refused` says why.
        """
        ids = torch.tensor([self.probe_ids], device=self.device)
        positions = torch.arange(len(self.probe_ids), device=self.device)[None]
        tree = TokenTree(self.probe_ids[0]).chain(self.probe_ids[1:])
        job, _ = self.cache().prepare(Ask(tree), self.probe_ids[:1], len(tree))

        def rows(loop: Loop, halved: bool = False) -> torch.Tensor:
            parts: list[Any] = [*range(len(loop.layers))]
            if halved:
                parts = [(i, half) for i in parts for half in ("attention", "mlp")]
            h = loop.run(loop.embedded(ids), positions, parts, (), {})
            return loop.logits(h[0])

        def stock_forward() -> torch.Tensor:
            return self._packed_stock_rows(ids, positions)

        def right(loop: Loop) -> bool:
            if self.agrees(rows(loop), loop.stock_rows):
                return True
            if not self.narrow:
                return False
            with unrounded():
                return self.agrees(rows(loop), stock_forward())

        token = STEP.set([job])
        try:
            with self._attention():
                loop = Loop(self.hf, self.head, windows, self.context, ids, stock_forward)
                if not right(loop):
                    self.loop_refused = "its layers, called one by one, give other rows"
                    return None
                stock = loop.blocks
                faster = accelerate(loop) if accelerate else None
                loop.blocks = faster or stock
                if accelerate and not faster:
                    self.blocks_refused = loop.refused or "its layers are of another build"
                elif faster and not right(loop):
                    self.blocks_refused = "they give other rows than the model's own layers"
                    loop.blocks = stock
                self.fused = loop.blocks is not stock
                loop.halved = self._halved(loop, rows)
                return loop
        except (LookupError, AttributeError, TypeError) as error:
            self.loop_refused = first_line(error)
            return None
        finally:
            STEP.reset(token)

    def _halved(self, loop: Loop, rows: Callable[[Loop, bool], torch.Tensor]) -> bool:
        """Whether the halves of its layers, one by one, give the rows of the whole."""
        if self.fused:
            return all(hasattr(block, "attention") for block in loop.blocks)
        wanted = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        for layer in loop.layers:
            if {name for name, _ in layer.named_children()} != wanted:
                return False
        try:
            return self.agrees(rows(loop, True), rows(loop, False))
        except (AttributeError, TypeError):  # parts of the same names that are called otherwise
            return False

    def self_test(self) -> None:
        """A tree behind a prompt in pieces must give the rows of its paths as the model alone
        computes them. Raises Unsupported.
        """
        tree = TokenTree(self.probe_ids[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        for node, row in enumerate(self._rows_of(tree, self.probe_ids)):
            path = torch.tensor([self.probe_ids + tree.tokens_to(node)], device=self.device)
            if not self.agrees(row, self._stock_rows(path)[-1]):
                raise self._refusal(
                    "a tree to give the rows of its paths, and a self-test found that it does not"
                )

    def _rows_of(self, tree: TokenTree, tokens: Sequence[int]) -> torch.Tensor:
        """Rows (N, V) of a tree below `tokens`, which an empty cache takes in by three."""
        cache = self.cache()
        done = False
        while not done:
            job, done = cache.prepare(Ask(tree), tokens, 3)
            reply = self.forward([job])[0]
        return reply.logits

    # --- executors

    def use(self, make: Make) -> None:
        """Hands ordinary steps to another executor. Raises LookupError, with the reason, where it
        cannot have them.
        """
        if self.loop is None:
            raise LookupError("the loop over the layers of this family is its own")
        with self._attention():
            executor = make(self.loop, self.layout, self.dtype, self.row_size)
        # A tree it was not recorded with, below rows of another forward, shows what was wrongly
        # recorded as a constant.
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab, (12,), generator=generator).tolist()
        tree = TokenTree(tokens[5]).chain(tokens[6:9]).chain(tokens[9:11])
        before = self.executor
        answers = []
        try:
            for self.executor in (None, executor):
                with torch.inference_mode():
                    answers.append(self._rows_of(tree, tokens[:6]))
        except Exception as error:  # a runtime may refuse a graph only when it compiles or runs it
            raise LookupError(f"it fails: {first_line(error)}") from error
        finally:
            self.executor = before
        by_torch, by_executor = answers

        def exact() -> torch.Tensor:
            with torch.inference_mode(), unrounded():
                return self._rows_of(tree, tokens[:6])

        if self.narrow:
            right = as_near(by_executor, by_torch, exact)
        else:
            right = self.agrees(by_executor, by_torch)
        if not right:
            raise LookupError("its logits differ from torch's by more than rounding")
        self.executor, self.most_jobs = executor, executor.most_jobs

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        if self.executor is not None:
            cache = self.executor.cache()
        else:
            cache = self.cache_type(self.layout, self.dtype, self.device)
        return self.prepared(cache, request, beside)

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        return held_bytes(self.hf)

    @property
    def tap_bytes(self) -> int:  # type: ignore[override]  # executors' states are float32
        return int(getattr(self.config, "hidden_size", 0)) * max(4, self.dtype.itemsize)

    @property
    def mask_copies(self) -> int:  # type: ignore[override]
        """Heads that share keys have a mask together, and so do layers of one window."""
        shared = min(shape[0] for shape in self.layout)
        heads = getattr(self.config, "num_attention_heads", shared)
        windows = 1 if self.loop is None else len(set(self.loop.windows))
        return max(1, heads // shared) * windows

    @property
    def exact_bits(self) -> bool:
        """Whether a row's result depends on no other row of a forward, to the last bit."""
        return self.executor is not None and self.executor.exact_bits

    @property
    def usual_executor(self) -> str:  # type: ignore[override]
        return "torch" if self.executor is None else self.executor.name

    @property
    def reads_segments(self) -> bool:  # type: ignore[override]
        return self.executor is None or self.executor.takes_segments

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Plain jobs by the executor, the others by torch: on the same caches."""
        return skipping(jobs, taps, self._compute)

    def _compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        executor = self.executor
        if executor is None:
            return self._by_torch(jobs, taps)
        kinds = ("layers", "segments", "watched", "canvases")
        takes = [getattr(executor, f"takes_{kind}") for kind in kinds]
        plain = [job for job in jobs if job.suits(*takes)]
        others = [job for job in jobs if job not in plain]
        if not plain:
            return self._by_torch(jobs, taps)
        computed = executor(plain, self._threads(), taps)
        if computed is None:
            return self._by_torch(jobs, taps)
        computed.computed_by, computed.width = executor.name, executor.size
        if not others:
            return computed
        rest = self._by_torch(others, taps)
        return interleave(jobs, (plain, computed), (others, rest))

    def _threads(self) -> int:
        return self.threads_wanted or torch.get_num_threads()

    def _by_torch(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        with torch_threads(self._threads()):
            return super().compute(jobs, taps)

    # --- torch; the views (views.py) replace single parts of it

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if self.loop is None:
            with self._attention():
                return self._packed_stock_rows(ids, positions, rows.long()), {}
        return run_layers(self, ids, positions, rows, first, taps)

    def _packed_stock_rows(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `_stock_rows`, of the packed row. A 4-D mask keeps transformers from building one."""
        mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        return self._stock_rows(ids, rows, position_ids=positions, attention_mask=mask)

    def layer_parallel(self, size: int) -> LayerParallel:
        """This decoder as a rough draft model with layers in groups of `size`, see parallel.py.

        Raises Unsupported.
        """
        try:
            if self.loop is None:
                raise LookupError(self.loop_refused)
            return LayerParallel(self, self.loop, size, partial(run_layers, self))
        except LookupError as error:
            need = f"layers whose attention can be computed by itself ({error})"
            cure = "use the method draft"
            raise Unsupported.missing("easyspec", self.name, need, cure) from error

    def retrieving(self, budget: int, chunk: int) -> Retrieving:
        """This decoder over `budget` retrieved rows, see retrieving.py. Raises Unsupported."""
        return Retrieving(self, budget, chunk)

    def turning(self, method: str) -> Turn:
        """How its keys are moved to other positions, see turning.py. Raises Unsupported."""
        try:
            return turn_of(self)
        except LookupError as error:
            need = f"positions that are rotations ({error})"
            raise Unsupported.missing(method, self.name, need, "leave kv out") from error

    def moving(self, method: str) -> Move:
        """How its keys are moved from one position to another. Raises Unsupported."""
        try:
            return move_of(self)
        except LookupError as error:
            need = f"positions that are rotations ({error})"
            raise Unsupported.missing(method, self.name, need, "use generate") from error

    def learning(self, kept: torch.Tensor | None = None) -> Learning:
        """It as a draft model that learns, see learning.py; `kept`: the tokens that its rows are
        of, None: all. Raises Unsupported.
        """
        return learning_decoder(self, Decoder, kept)

    def adapted(self, folder: str) -> Model:
        """It with the LoRA weights in a folder, see adapted.py. Raises Unsupported, BadModel."""
        return adapted(self, Decoder, folder)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.embedded(torch.tensor(tokens, device=self.device))

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """What enters layer 0 for these ids, (..., E)."""
        assert self.loop is not None, "a model that runs whole lacks the capability `layers`"
        return self.loop.embedded(ids)

    def chosen(self, layers: Sequence[Any] | None) -> Sequence[Any]:
        """The layers to run where a job names these; None: it wants them all."""
        return range(len(self.layout)) if layers is None else layers

    def read(self, h: torch.Tensor) -> torch.Tensor:
        """Rows (n, `row_size`) of what left the last layer, (n, E)."""
        assert self.loop is not None, "a model that runs whole lacks the capability `layers`"
        return self.loop.logits(h)
