"""A stock, unpatched transformers decoder as a Model.

The model's own modules run on the packed row; attention is registered through transformers'
AttentionInterface and chosen for the time of a forward, so that the model stays usable by itself.
Where a family has the usual skeleton the loop over its layers is ours too (loop.py), which gives
hidden states, layer subsets and entry in the middle; others run whole. What a family really does is
measured when it is loaded, a sliding window too, never looked up by its name, and one that cannot
be right is refused before the first forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from foretell.errors import ForetellError, Unsupported, first_message_line
from foretell.models.backend import Backend, interleave_results
from foretell.models.decoder.adapted import adapt_decoder
from foretell.models.decoder.backend_check import check_backend
from foretell.models.decoder.layered import run_layers
from foretell.models.decoder.learning import Learning, learning_decoder
from foretell.models.decoder.loop import Block, Loop, use_attention
from foretell.models.decoder.packed import (
    held_bytes,
    narrowest_format,
    without_products,
    without_rounding,
)
from foretell.models.decoder.parallel import LayerParallel
from foretell.models.decoder.probing import (
    PROBE,
    AttentionCall,
    AttentionProbe,
    check_calls,
    rows_agree,
)
from foretell.models.decoder.retrieving import Retrieving
from foretell.models.decoder.skipping import run_skipping
from foretell.models.decoder.turning import Move, Turn, move_of, turn_of
from foretell.models.families.description import known_families
from foretell.native import library
from foretell.ops.threads import torch_threads

if TYPE_CHECKING:
    from foretell.core.request import Request

# Families whose packed forward the project's tests compare with transformers' own; others are
# tested when loaded.
PROVEN = frozenset(("deepseek_v3", "nanochat")) | frozenset(known_families())
UNLIMITED = 1 << 20  # positions of a model that names no limit
Accelerate = Callable[[Loop], list[Block] | None]
Make = Callable[[Loop, Layout, torch.dtype, int], Backend]


def _attend_packed(
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


AttentionInterface.register("foretell", _attend_packed)
AttentionMaskInterface.register("foretell", lambda *args, **kwargs: None)


def context_of(config: Any) -> int:
    """Positions that a model with this configuration can tell apart, all of them exactly."""
    limit = int(getattr(config, "max_position_embeddings", None) or UNLIMITED)
    original = getattr(config, "original_max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for rotation in (rope, *rope.values()):  # one rotation, or one for each kind of layer
        if isinstance(rotation, dict) and rotation.get("rope_type") in ("dynamic", "longrope"):
            # Their frequencies depend on the longest request of a forward, so only the original
            # range is exact.
            exact = rotation.get("original_max_position_embeddings") or original or limit
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
        self, hf_model: PreTrainedModel, name: str = "model", accelerate: Accelerate | None = None
    ):
        self.hf = hf_model.eval()
        self.name = name
        self.config = hf_model.config.get_text_config()
        self.device = hf_model.device
        self.dtype = hf_model.dtype
        self.backend: Backend | None = None  # computes ordinary steps in torch's place
        self.loop: Loop | None = None
        self.fused = False  # whether no module of a layer is called
        self.loop_refused: str | None = None
        self.blocks_refused: str | None = None
        # The narrowest numbers of linear layers whose products round activations to fewer bits than
        # the rest of the model has, else None.
        self.matrices = narrowest_format(hf_model, self.dtype)
        # Whether it has some: backends round their activations in different ways.
        self.narrow = self.matrices is not None
        output_head = self._find_head()
        if output_head is None or hf_model.config.is_encoder_decoder:
            raise self._refusal(f"a decoder with {self._head_in_words}")
        self.head = output_head
        self.vocab, self.row_size = self._row_sizes()
        self.known_ids = self.vocab  # ids that can be embedded; a view may have more
        self.context = context_of(self.config)
        self.probe_ids = [(1 + 37 * i) % self.vocab for i in range(7)]
        self.takes_rows = "logits_to_keep" in inspect.signature(hf_model.forward).parameters
        try:
            with torch.inference_mode():
                self.layout, windows = self._measure_layout()
                self.loop = self._build_loop(windows, accelerate)
                if self.config.model_type not in PROVEN:
                    self.self_test()
        except ForetellError:
            raise
        except Exception as error:  # the forward of an unknown family may raise anything
            reason = first_message_line(error)
            raise self._refusal(f"the usual forward of a decoder ({reason})") from error
        if self.loop is not None:
            self.caps = Model.caps | {"layers", "taps"} | ({"parts"} if self.loop.halved else set())

    # --- what a model with another head does in its own way

    _head_in_words = "a language model head"

    def _find_head(self) -> Any:
        return self.hf.get_output_embeddings()

    def _row_sizes(self) -> tuple[int, int]:
        """How many token ids there are, and how many numbers a row has."""
        vocab_size = getattr(self.head, "out_features", 0) or int(self.head.weight.shape[0])
        return vocab_size, vocab_size

    def _stock_rows(
        self, token_ids: torch.Tensor, rows: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor:
        """Rows (n, V) of ids (1, n), or (R, V) of these `rows`, by the model's own forward."""
        selects_rows = rows is not None and self.takes_rows
        if selects_rows:
            inputs["logits_to_keep"] = rows
        logits: torch.Tensor = self.hf(input_ids=token_ids, use_cache=False, **inputs).logits[0]
        return logits if rows is None or selects_rows else logits[rows]

    # --- what a family does, measured

    def _refusal(self, capability: str) -> Unsupported:
        model_title = f"{self.name} (family {self.config.model_type})"
        cure = "use transformers' own generate for it"
        return Unsupported.missing_capability("foretell", model_title, capability, cure)

    def _use_attention(self, attention_kind: str = "foretell") -> AbstractContextManager[None]:
        return use_attention(self.config, attention_kind)

    def _measure_layout(self) -> tuple[Layout, list[int | None]]:
        """Measures what each layer stores, and its window. Raises Unsupported where a layer does
        not leave all of attention to us.
        """
        calls = self._attention_calls()
        return tuple(call.shape for call in calls.values()), [c.window for c in calls.values()]

    def _attention_calls(self, exempt_layers: Collection[int] = ()) -> dict[int, AttentionCall]:
        """Records what each layer hands to attention, in order; `exempt_layers` may hand it
        nothing.

        Raises Unsupported as `_measure_layout` does.
        """
        probe = AttentionProbe(min(self.context, UNLIMITED))
        context_token = PROBE.set(probe)
        try:
            with self._use_attention("foretell-probe"), without_products():
                token_ids = torch.tensor([self.probe_ids], device=self.device)
                self.hf(input_ids=token_ids, use_cache=False)
        finally:
            PROBE.reset(context_token)
        layer_count = max([int(self.config.num_hidden_layers), *(i + 1 for i in probe.calls)])
        missing_layers = [
            str(i) for i in range(layer_count) if i not in probe.calls and i not in exempt_layers
        ]
        if missing_layers:
            raise self._refusal(
                f"attention through transformers' interface in every layer, which layers "
                f"{', '.join(missing_layers[:6])} do not use (older code, or a state without mixer)"
            )
        calls = {i: probe.calls[i] for i in sorted(probe.calls)}
        try:
            check_calls(probe.span, calls)
        except LookupError as error:
            raise self._refusal(str(error)) from error
        return calls

    def agrees(self, our_rows: torch.Tensor, their_rows: torch.Tensor) -> bool:
        """Whether two computations of the same rows differ by rounding only."""
        is_wide = self.dtype in (torch.float32, torch.float64) and not self.narrow
        if self.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            is_wide = False  # torch was told that products in float32 may round as coarser ones
        return rows_agree(our_rows.float(), their_rows.float(), is_wide)

    def _build_loop(self, windows: list[int | None], accelerate: Accelerate | None) -> Loop | None:
        """The loop if it gives the model's own rows, else None, and `loop_refused` says why."""
        token_ids = torch.tensor([self.probe_ids], device=self.device)
        positions = torch.arange(len(self.probe_ids), device=self.device)[None]
        tree = TokenTree(self.probe_ids[0]).chain(self.probe_ids[1:])
        probe_job, _ = self.cache().prepare(Ask(tree), self.probe_ids[:1], len(tree))

        def loop_rows(loop: Loop, halved: bool = False) -> torch.Tensor:
            parts: list[Any] = [*range(len(loop.layers))]
            if halved:
                parts = [(i, half) for i in parts for half in ("attention", "mlp")]
            states = loop.placed(loop.embedded(token_ids), positions[0])
            states = loop.run(states, positions, parts, (), {})
            return loop.logits(states[0])

        def stock_forward() -> torch.Tensor:
            return self._packed_stock_rows(token_ids, positions)

        def is_right(loop: Loop) -> bool:
            if self.agrees(loop_rows(loop), loop.stock_rows):
                return True
            if not self.narrow:
                return False
            with without_rounding():
                return self.agrees(loop_rows(loop), stock_forward())

        context_token = STEP.set([probe_job])
        try:
            with self._use_attention():
                loop = Loop(self.hf, self.head, windows, self.context, token_ids, stock_forward)
                stock_blocks, faster_blocks = loop.blocks, accelerate and accelerate(loop)
                loop.blocks = faster_blocks or stock_blocks
                self.fused = bool(faster_blocks) and is_right(loop)
                if accelerate and not faster_blocks:
                    self.blocks_refused = loop.refused or "its layers are of another build"
                elif not self.fused and faster_blocks:
                    self.blocks_refused = "they give other rows than the model's own layers"
                    loop.blocks = stock_blocks
                if not self.fused and not is_right(loop):
                    self.loop_refused = "its layers, called one by one, give other rows"
                    return None
                loop.halved = self._halves_agree(loop, loop_rows)
                return loop
        except (LookupError, AttributeError, TypeError) as error:
            self.loop_refused = first_message_line(error)
            return None
        finally:
            STEP.reset(context_token)

    def _halves_agree(self, loop: Loop, run_rows: Callable[[Loop, bool], torch.Tensor]) -> bool:
        """Whether the halves of its layers, one by one, give the rows of the whole."""
        if self.fused:
            return all(hasattr(block, "attention") for block in loop.blocks)
        expected_parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        for layer in loop.layers:
            if {part_name for part_name, _ in layer.named_children()} != expected_parts:
                return False
        try:
            return self.agrees(run_rows(loop, True), run_rows(loop, False))
        except (AttributeError, TypeError):  # parts of the same names that are called otherwise
            return False

    def self_test(self) -> None:
        """Tests a tree after a prompt in pieces against the model's rows. Raises Unsupported."""
        if not self._tree_agrees():
            raise self._refusal(
                "a tree to give the rows of its paths, and a self-test found that it does not"
            )

    def _tree_agrees(self) -> bool:
        """Whether a tree gives the rows of its paths; packed weights round activations, which may
        look like another row and is left out then.
        """
        tree = TokenTree(self.probe_ids[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        with without_rounding() if self.narrow else nullcontext():
            tree_rows = self.tree_rows(tree, self.probe_ids)
            path_rows = []
            for node in range(len(tree)):
                path_ids = torch.tensor([self.probe_ids + tree.tokens_to(node)], device=self.device)
                path_rows.append(self._stock_rows(path_ids)[-1])
        return all(map(self.agrees, tree_rows, path_rows))

    def tree_rows(
        self, tree: TokenTree, tokens: Sequence[int], layers: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Rows (N, V) of a tree below `tokens`, which an empty cache takes in by three; `layers`:
        those that run, None: all.
        """
        cache = self.cache()
        finished = False
        while not finished:
            job, finished = cache.prepare(Ask(tree, layers=layers), tokens, 3)
            reply = self.forward([job])[0]
        return reply.logits

    # --- backends

    def use(self, make_backend: Make) -> None:
        """Hands ordinary steps to a backend. Raises LookupError, saying why, if it refuses."""
        if self.loop is None:
            raise LookupError("the loop over the layers of this family is its own")
        with self._use_attention():
            backend = make_backend(self.loop, self.layout, self.dtype, self.row_size)
        check_backend(self, backend)
        self.backend, self.most_jobs = backend, backend.most_jobs

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        if self.backend is not None:
            cache = self.backend.cache()
        else:
            cache = self.cache_type(self.layout, self.dtype, self.device)
        return self.prepare_cache(cache, request, beside)

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        return held_bytes(self.hf)

    @property
    def tap_bytes(self) -> int:  # type: ignore[override]  # backends' states are float32
        return int(getattr(self.config, "hidden_size", 0)) * max(4, self.dtype.itemsize)

    @property
    def mask_copies(self) -> int:  # type: ignore[override]
        """Heads that share keys have a mask together, and so do layers of one window."""
        key_heads = min(shape[0] for shape in self.layout)
        query_heads = getattr(self.config, "num_attention_heads", key_heads)
        window_count = 1 if self.loop is None else len(set(self.loop.windows))
        return max(1, query_heads // key_heads) * window_count

    @property
    def exact_bits(self) -> bool:
        """Whether a row's result depends on no other row of a forward, to the last bit."""
        return self.backend is not None and self.backend.exact_bits

    @property
    def usual_backend(self) -> str:  # type: ignore[override]
        return "torch" if self.backend is None else self.backend.name

    @property
    def reads_segments(self) -> bool:  # type: ignore[override]
        return self.backend is None or self.backend.takes_segments

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Computes plain jobs by the backend and the others by torch, on the same caches."""
        return run_skipping(jobs, taps, self._compute_jobs)

    def _compute_jobs(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        backend = self.backend
        if backend is None:
            return self._by_torch(jobs, taps)
        job_kinds = ("layers", "segments", "watched", "canvases")
        taken_kinds = [getattr(backend, f"takes_{job_kind}") for job_kind in job_kinds]
        plain_jobs = [job for job in jobs if job.suits(*taken_kinds)]
        other_jobs = [job for job in jobs if job not in plain_jobs]
        if not plain_jobs:
            return self._by_torch(jobs, taps)
        computed = backend(plain_jobs, self.threads_wanted or library.thread_count(), taps)
        if computed is None:
            return self._by_torch(jobs, taps)
        computed.computed_by, computed.width = backend.name, backend.size
        if not other_jobs:
            return computed
        torch_result = self._by_torch(other_jobs, taps)
        return interleave_results(jobs, (plain_jobs, computed), (other_jobs, torch_result))

    def _thread_count(self) -> int:
        return self.threads_wanted or torch.get_num_threads()

    def _by_torch(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        with torch_threads(self._thread_count()):
            return super().compute(jobs, taps)

    # --- torch; views of a decoder (subclasses) replace single parts of it

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if self.loop is None:
            with self._use_attention():
                return self._packed_stock_rows(token_ids, positions, row_indices.long()), {}
        return run_layers(self, token_ids, positions, row_indices, first_job, taps)

    def _packed_stock_rows(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Takes `_stock_rows` of the packed row. A 4-D mask keeps transformers from making one."""
        mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        return self._stock_rows(token_ids, rows, position_ids=positions, attention_mask=mask)

    def layer_parallel(self, group_size: int) -> LayerParallel:
        """Makes a rough draft model with layers in groups of `group_size`, see parallel.py.

        Raises Unsupported.
        """
        try:
            if self.loop is None:
                raise LookupError(self.loop_refused)
            return LayerParallel(self, self.loop, group_size, partial(run_layers, self))
        except LookupError as error:
            need = f"layers whose attention can be computed by itself ({error})"
            cure = "use the method draft"
            raise Unsupported.missing_capability("easyspec", self.name, need, cure) from error

    def retrieving_model(self, max_rows: int, chunk_size: int) -> Retrieving:
        """Makes a model over `max_rows` retrieved rows, see retrieving.py. Raises Unsupported."""
        return Retrieving(self, max_rows, chunk_size)

    def find_turn(self, method: str) -> Turn:
        """Finds how its keys move by some positions, see turning.py. Raises Unsupported."""
        try:
            return turn_of(self)
        except LookupError as error:
            need = f"positions that are rotations ({error})"
            raise Unsupported.missing_capability(method, self.name, need, "leave kv out") from error

    def find_move(self, method: str) -> Move:
        """Finds how its keys are moved from one position to another. Raises Unsupported."""
        try:
            return move_of(self)
        except LookupError as error:
            need = f"positions that are rotations ({error})"
            raise Unsupported.missing_capability(method, self.name, need, "use generate") from error

    def learning(self, row_tokens: torch.Tensor | None = None) -> Learning:
        """Makes a draft model that learns, see learning.py; `row_tokens`: of its rows. Raises
        Unsupported.
        """
        return learning_decoder(self, Decoder, row_tokens)

    def adapted(self, folder: str) -> Model:
        """Adds the LoRA weights in a folder, see adapted.py. Raises Unsupported, BadModel."""
        return adapt_decoder(self, Decoder, folder)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.embedded(torch.tensor(tokens, device=self.device))

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., E) of these ids, without what is learnt of positions."""
        assert self.loop is not None, "a model that runs whole lacks the capability `layers`"
        return self.loop.embedded(token_ids)

    def layers_to_run(self, layers: Sequence[Any] | None) -> Sequence[Any]:
        """The layers to run where a job names these; None: it wants them all."""
        return range(len(self.layout)) if layers is None else layers

    def head_rows(self, states: torch.Tensor) -> torch.Tensor:
        """Rows (n, `row_size`) of states (n, E) that left the last layer."""
        assert self.loop is not None, "a model that runs whole lacks the capability `layers`"
        return self.loop.logits(states)
