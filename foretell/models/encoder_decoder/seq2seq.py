"""A stock, unpatched transformers encoder-decoder as a Model.

A request's source (`inputs["source"]`, token ids) goes through the model's own encoder once. What
the decoder's layers make of it is kept (source.py), and from then on only the decoder runs: layer
by layer on the packed row, as Loop does it, with positions, biases and masks that are ours. What a
family really does is measured when it is loaded, never looked up by its name, and one that cannot
be right is refused before the first forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from foretell.cache.buffers import Layout
from foretell.cache.cache import Cache
from foretell.cache.job import Job, join_entry_states
from foretell.core.model import STEP, Computed, Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, ForetellError, PromptTooLong, Unsupported, first_message_line
from foretell.models.decoder.decoder import UNLIMITED, context_of
from foretell.models.decoder.loop import use_attention
from foretell.models.decoder.packed import WHOLE_NUMBERS
from foretell.models.decoder.probing import PROBE, AttentionProbe, layer_layouts
from foretell.models.encoder_decoder.crossing import RECORDED, DecoderParts
from foretell.models.encoder_decoder.source import BlockCache, Layers, SourceCache, SourceRows
from foretell.ops.threads import torch_threads

if TYPE_CHECKING:
    from foretell.core.request import Request

HALF = 0.2  # distance of two rows in 16 bits that rounding explains, as a part of their length
SAMPLE = 16  # tokens of the source that stands for one where there is no request


def check_plain(
    model_name: str, exact_bits: bool = False, backend: str = "auto", dtype: str = "auto"
) -> None:
    """Raises Unsupported for what an encoder-decoder is asked and decoders alone have."""
    need = "a model that is a decoder only"
    if exact_bits:
        raise Unsupported.missing_capability("exact_bits=True", model_name, need, "leave it out")
    if backend not in ("auto", "torch"):
        cure = "leave backend out, and torch computes it"
        raise Unsupported.missing_capability(f"backend={backend!r}", model_name, need, cure)
    if dtype in WHOLE_NUMBERS:
        raise Unsupported.missing_capability(
            f"dtype={dtype!r}", model_name, need, "use bfloat16 or float32"
        )


class EncoderDecoder(Model):
    """A transformers encoder-decoder. A prompt is its source; its text begins with `start`.

    `caps`: `source`, `tree`, `taps`; `layers` where what enters layer 0 depends on tokens alone. A
    model whose configuration says `fills_blocks` and has a `mask_token_id` reads a tree as a block
    whose nodes see each other; it has `blocks` in place of `tree`. Raises Unsupported, naming the
    reason, when the family cannot be computed right.
    """

    layout: Layout  # type: ignore[assignment]  # every layer keeps rows
    cache_type: type[SourceCache] = SourceCache

    def __init__(self, hf_model: PreTrainedModel, model_name: str = "model"):
        self.hf = hf_model.eval()
        self.name = model_name
        self.config = hf_model.config
        self.device = hf_model.device
        self.dtype = hf_model.dtype
        # Of each tenant and source; they live as long as a cache that reads them.
        self.sources: WeakValueDictionary[Any, SourceRows] = WeakValueDictionary()
        self.encoder: Any = hf_model.get_encoder()
        try:
            with torch.inference_mode():
                self._take_apart()
                self.self_test()
        except ForetellError:
            raise
        except Exception as error:  # the forward of an unknown family may raise anything
            raise self._refusal(
                f"the usual forward of an encoder-decoder ({first_message_line(error)})"
            ) from error
        self.mask_token: int | None = getattr(hf_model.config, "mask_token_id", None)
        self.caps = Model.caps | {"source", "taps"}
        if self.parts.places is None:
            self.caps |= {"layers"}
        if getattr(hf_model.config, "fills_blocks", False):
            self.caps = (self.caps - {"tree", "rows"}) | {"blocks"}
            self.cache_type = BlockCache

    def _refusal(self, capability: str) -> Unsupported:
        model_title = f"{self.name} (family {self.config.model_type})"
        return Unsupported.missing_capability(
            "foretell", model_title, capability, "use transformers' own generate for it"
        )

    # --- what a family does, measured

    def _take_apart(self) -> None:
        self.start = self._start_tokens()
        self.parts = DecoderParts(self.hf)
        self.vocab = int(self.parts.head.weight.shape[0])
        self.source_vocab = int(self.encoder.get_input_embeddings().weight.shape[0])
        self.context = context_of(self.parts.config)
        self.source_context = context_of(self.encoder.config)
        self.sample = [(1 + 37 * index) % self.source_vocab for index in range(SAMPLE)]
        self.probe_ids = [*self.start, *((1 + 37 * index) % self.vocab for index in range(6))]
        entering_states: list[torch.Tensor] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            entering_states.append(args[0] if args else kwargs["hidden_states"])

        hook = self.parts.layers[0].register_forward_pre_hook(note, with_kwargs=True)
        try:
            self.stock_rows(self.sample, self.probe_ids)
        finally:
            hook.remove()
        self.parts.measure_scale(
            entering_states[0], torch.tensor([self.probe_ids], device=self.device)
        )
        self.layout = self._measure_layout()

    def _start_tokens(self) -> list[int]:
        """The first tokens of every text: the decoder's start, and one its settings put after."""
        settings: Any = self.hf.generation_config
        first_token = settings.decoder_start_token_id
        if first_token is None:
            first_token = settings.bos_token_id
        start_tokens = [first_token, settings.forced_bos_token_id]
        if not isinstance(first_token, int):
            raise self._refusal("one token that every text begins with (decoder_start_token_id)")
        return [token for token in start_tokens if token is not None]

    def _measure_layout(self) -> Layout:
        """Measures what each layer stores. Raises Unsupported where one does not leave attention to
        us.
        """
        probe = AttentionProbe(min(self.context, UNLIMITED))
        context_token = PROBE.set(probe)
        try:
            encoder_states = self._encode_source(self.sample)
            with use_attention(self.parts.config, "foretell-probe"):
                self.stock_rows(self.sample, self.probe_ids, encoder_states)
        finally:
            PROBE.reset(context_token)
        layer_count = len(self.parts.layers)
        missing_layers = [
            str(layer)
            for layer in range(layer_count)
            if not (layer in probe.calls and layer in probe.cross)
        ]
        if missing_layers:
            raise self._refusal(
                f"attention to text and source through transformers' interface, which layers "
                f"{', '.join(missing_layers[:6])} do not use"
            )
        try:
            return layer_layouts(probe, layer_count, self.parts.bias is not None)[0]
        except LookupError as error:
            raise self._refusal(str(error)) from error

    def stock_rows(
        self,
        source_ids: Sequence[int],
        text_ids: Sequence[int],
        encoder_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows (n, V) of a text by the model's own forward; `encoder_states`: its encoder's, if
        known.
        """
        token_ids = torch.tensor([list(text_ids)], device=self.device)
        encoder_inputs: dict[str, Any] = {
            "input_ids": torch.tensor([list(source_ids)], device=self.device)
        }
        if encoder_states is not None:
            encoder_output: Any = BaseModelOutput(encoder_states)  # type: ignore[arg-type]
            encoder_inputs = {"encoder_outputs": encoder_output}
        rows: torch.Tensor = self.hf(
            **encoder_inputs,
            attention_mask=token_ids.new_ones(1, len(source_ids)),
            decoder_input_ids=token_ids,
            decoder_attention_mask=torch.ones_like(token_ids),
            use_cache=False,
        ).logits[0]
        if self.parts.banned:
            rows[:, self.parts.banned] = -torch.inf
        return rows

    def self_test(self) -> None:
        """A tree after a text in pieces must give the rows of its paths as the model alone
        computes them. Raises Unsupported.
        """
        token_ids = self.probe_ids
        tree = TokenTree(token_ids[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        for node, our_row in enumerate(self._rows_of(tree, token_ids)):
            their_row = self.stock_rows(self.sample, [*token_ids, *tree.tokens_to(node)])[-1]
            if not self._rows_agree(our_row, their_row):
                raise self._refusal(
                    "a tree to give the rows of its paths, and a self-test found that it does not"
                )

    def _rows_agree(self, our_row: torch.Tensor, their_row: torch.Tensor) -> bool:
        """Whether two computations of a row (V,) differ by rounding only."""
        is_possible = their_row.isfinite()
        if not torch.equal(is_possible, our_row.isfinite()):
            return False
        our_row, their_row = our_row[is_possible].float(), their_row[is_possible].float()
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else HALF
        return bool((our_row - their_row).norm() <= tolerance * their_row.norm())

    def _rows_of(self, tree: TokenTree, tokens: Sequence[int]) -> torch.Tensor:
        """Rows (N, V) of a tree below `tokens`, which an empty cache takes in by three."""
        cache = self.cache()
        finished = False
        while not finished:
            job, finished = cache.prepare(Ask(tree), tokens, 3)
            reply = self.forward([job])[0]
        return reply.logits

    # --- the source

    def check_source(self, source: Any) -> None:
        """Raises BadConfig or PromptTooLong for what the encoder cannot read."""
        if source is None:
            raise BadConfig(
                f"{self.name} reads a source beside its text: give token ids as "
                'Request(inputs={"source": ...}), or use LM.generate'
            )
        is_known = all(
            isinstance(token, int) and 0 <= token < self.source_vocab for token in source
        )
        if not is_known or not len(source):
            id_range = f"0 to {self.source_vocab - 1}"
            raise BadConfig(f"a prompt has at least one token, all of the vocabulary ({id_range})")
        if len(source) > self.source_context:
            raise PromptTooLong(
                f"the prompt has {len(source)} tokens and the encoder of {self.name} holds "
                f"{self.source_context}; shorten it"
            )

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        """Makes an empty cache, as Model does. Without a request it reads a sample in place of a
        source, as measurements of costs do.
        """
        cache = self.cache_type(self.layout, self.dtype, self.device)
        source_ids = self.sample if request is None else request.inputs.get("source")
        self.check_source(source_ids)
        source_key = ("" if request is None else request.tenant, tuple(source_ids or ()))
        cache.source = self.sources.get(source_key) or SourceRows(source_key[1])
        self.sources[source_key] = cache.source
        return self.prepare_cache(cache, request, beside)

    def _encode_source(self, tokens: Sequence[int]) -> torch.Tensor:
        """The encoder's states (1, S, E)."""
        token_ids = torch.tensor([list(tokens)], device=self.device)
        output = self.encoder(input_ids=token_ids, attention_mask=torch.ones_like(token_ids))
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _source_layers(self, tokens: Sequence[int]) -> Layers:
        """Keys and values of a source, of each layer of the decoder."""
        source_length = len(tokens)
        # One token runs through the decoder, whose layers then show what they make of the source.
        # Two for a source of one, so that its keys are told from those of the text.
        token_ids = torch.tensor(
            [[self.start[0]] * (2 if source_length == 1 else 1)], device=self.device
        )
        positions = torch.arange(token_ids.shape[1], device=self.device)[None]
        layers: Layers = []
        encoder_states = self._encode_source(tokens)
        context_token = RECORDED.set((source_length, layers))
        try:
            with use_attention(self.parts.config, "foretell-source-rows"):
                states = self.parts.embedded(token_ids, positions)
                self.parts.run(
                    states, positions, range(len(self.parts.layers)), source=encoder_states
                )
        finally:
            RECORDED.reset(context_token)
        assert len(layers) == len(self.layout), "each layer attends to the source once"
        return layers

    # --- the forward

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Encodes the sources that are new, then runs the decoder."""
        encoded_count = 0
        with torch_threads(self.threads_wanted or torch.get_num_threads()):
            for job in jobs:
                source: SourceRows = job.cache.source
                if source.layers is None:
                    source.layers = self._source_layers(source.tokens)
                    encoded_count += len(source.tokens)
            computed = super().compute(jobs, taps)
        computed.width += encoded_count
        return computed

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        tapped_states: dict[int, torch.Tensor] = {}
        layers = range(len(self.layout)) if first_job.layers is None else first_job.layers
        with use_attention(self.parts.config, "foretell-source"):
            entry_states = join_entry_states(STEP.get(), self.embed)
            states = (
                self.parts.embedded(token_ids, positions)
                if entry_states is None
                else entry_states[None]
            )
            states = self.parts.run(states, positions, layers, taps, tapped_states)[0]
        return self.parts.logits(states[row_indices.long()]), tapped_states

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        assert self.parts.places is None, "positions enter layer 0 too: it cannot `layers`"
        token_ids = torch.tensor([list(tokens)], device=self.device)
        return self.parts.embedded(token_ids, torch.zeros_like(token_ids))[0]
