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
from foretell.cache.job import Job, entering
from foretell.core.model import STEP, Computed, Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, ForetellError, PromptTooLong, Unsupported, first_line
from foretell.models.decoder.decoder import UNLIMITED, context_of
from foretell.models.decoder.loop import attending
from foretell.models.decoder.packed import WHOLE_NUMBERS
from foretell.models.decoder.probing import PROBE, AttentionProbe, layouts
from foretell.models.encoder_decoder.crossing import RECORDED, DecoderParts
from foretell.models.encoder_decoder.source import BlockCache, Layers, SourceCache, SourceRows
from foretell.ops.threads import torch_threads

if TYPE_CHECKING:
    from foretell.core.request import Request

HALF = 0.2  # distance of two rows in 16 bits that rounding explains, as a part of their length
SAMPLE = 16  # tokens of the source that stands for one where there is no request


def check_plain(
    name: str, exact_bits: bool = False, executor: str = "auto", dtype: str = "auto"
) -> None:
    """Raises Unsupported for what an encoder-decoder is asked and decoders alone have."""
    need = "a model that is a decoder only"
    if exact_bits:
        raise Unsupported.missing("exact_bits=True", name, need, "leave it out")
    if executor not in ("auto", "torch"):
        cure = "leave executor out, and torch computes it"
        raise Unsupported.missing(f"executor={executor!r}", name, need, cure)
    if dtype in WHOLE_NUMBERS:
        raise Unsupported.missing(f"dtype={dtype!r}", name, need, "use bfloat16 or float32")


class EncoderDecoder(Model):
    """A transformers encoder-decoder. A prompt is its source; its text begins with `start`.

    `caps`: `source`, `tree`, `taps`; `layers` where what enters layer 0 depends on tokens alone. A
    model whose configuration says `fills_blocks` and has a `mask_token_id` reads a tree as a block
    whose nodes see each other; it has `blocks` in place of `tree`. Raises Unsupported, naming the
    reason, when the family cannot be computed right.
    """

    layout: Layout  # type: ignore[assignment]  # every layer keeps rows
    cache_type: type[SourceCache] = SourceCache

    def __init__(self, hf: PreTrainedModel, name: str = "model"):
        self.hf = hf.eval()
        self.name = name
        self.config = hf.config
        self.device = hf.device
        self.dtype = hf.dtype
        # Of each tenant and source; they live as long as a cache that reads them.
        self.sources: WeakValueDictionary[Any, SourceRows] = WeakValueDictionary()
        self.encoder: Any = hf.get_encoder()
        try:
            with torch.inference_mode():
                self._take_apart()
                self.self_test()
        except ForetellError:
            raise
        except Exception as error:  # the forward of an unknown family may raise anything
            raise self._refusal(
                f"the usual forward of an encoder-decoder ({first_line(error)})"
            ) from error
        self.mask_token: int | None = getattr(hf.config, "mask_token_id", None)
        self.caps = Model.caps | {"source", "taps"}
        if self.parts.places is None:
            self.caps |= {"layers"}
        if getattr(hf.config, "fills_blocks", False):
            self.caps = (self.caps - {"tree", "rows"}) | {"blocks"}
            self.cache_type = BlockCache

    def _refusal(self, capability: str) -> Unsupported:
        model = f"{self.name} (family {self.config.model_type})"
        return Unsupported.missing(
            "foretell", model, capability, "use transformers' own generate for it"
        )

    # --- what a family does, measured

    def _take_apart(self) -> None:
        self.start = self._start()
        self.parts = DecoderParts(self.hf)
        self.vocab = int(self.parts.head.weight.shape[0])
        self.source_vocab = int(self.encoder.get_input_embeddings().weight.shape[0])
        self.context = context_of(self.parts.config)
        self.source_context = context_of(self.encoder.config)
        self.sample = [(1 + 37 * i) % self.source_vocab for i in range(SAMPLE)]
        self.probe_ids = [*self.start, *((1 + 37 * i) % self.vocab for i in range(6))]
        entering: list[torch.Tensor] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            entering.append(args[0] if args else kwargs["hidden_states"])

        hook = self.parts.layers[0].register_forward_pre_hook(note, with_kwargs=True)
        try:
            self.stock_rows(self.sample, self.probe_ids)
        finally:
            hook.remove()
        self.parts.measure_scale(entering[0], torch.tensor([self.probe_ids], device=self.device))
        self.layout = self._layout()

    def _start(self) -> list[int]:
        """The first tokens of every text: the decoder's start, and one its settings put behind."""
        settings: Any = self.hf.generation_config
        first = settings.decoder_start_token_id
        if first is None:
            first = settings.bos_token_id
        start = [first, settings.forced_bos_token_id]
        if not isinstance(first, int):
            raise self._refusal("one token that every text begins with (decoder_start_token_id)")
        return [token for token in start if token is not None]

    def _layout(self) -> Layout:
        """What each layer stores. Raises Unsupported where one does not leave attention to us."""
        probe = AttentionProbe(min(self.context, UNLIMITED))
        token = PROBE.set(probe)
        try:
            states = self._encoded(self.sample)
            with attending(self.parts.config, "foretell-probe"):
                self.stock_rows(self.sample, self.probe_ids, states)
        finally:
            PROBE.reset(token)
        count = len(self.parts.layers)
        missing = [str(i) for i in range(count) if not (i in probe.calls and i in probe.cross)]
        if missing:
            raise self._refusal(
                f"attention to text and source through transformers' interface, which layers "
                f"{', '.join(missing[:6])} do not use"
            )
        try:
            return layouts(probe, count, self.parts.bias is not None)[0]
        except LookupError as error:
            raise self._refusal(str(error)) from error

    def stock_rows(
        self, source: Sequence[int], text: Sequence[int], states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows (n, V) of a text by the model's own forward; `states`: its encoder's, if known."""
        ids = torch.tensor([list(text)], device=self.device)
        given: dict[str, Any] = {"input_ids": torch.tensor([list(source)], device=self.device)}
        if states is not None:
            known: Any = BaseModelOutput(states)  # type: ignore[arg-type]
            given = {"encoder_outputs": known}
        rows: torch.Tensor = self.hf(
            **given,
            attention_mask=ids.new_ones(1, len(source)),
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones_like(ids),
            use_cache=False,
        ).logits[0]
        if self.parts.banned:
            rows[:, self.parts.banned] = -torch.inf
        return rows

    def self_test(self) -> None:
        """A tree behind a text in pieces must give the rows of its paths as the model alone
        computes them. Raises Unsupported.
        """
        ids = self.probe_ids
        tree = TokenTree(ids[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        for node, row in enumerate(self._rows_of(tree, ids)):
            theirs = self.stock_rows(self.sample, [*ids, *tree.tokens_to(node)])[-1]
            if not self._agree(row, theirs):
                raise self._refusal(
                    "a tree to give the rows of its paths, and a self-test found that it does not"
                )

    def _agree(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Whether two computations of a row (V,) differ by rounding only."""
        possible = theirs.isfinite()
        if not torch.equal(possible, ours.isfinite()):
            return False
        ours, theirs = ours[possible].float(), theirs[possible].float()
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else HALF
        return bool((ours - theirs).norm() <= tolerance * theirs.norm())

    def _rows_of(self, tree: TokenTree, tokens: Sequence[int]) -> torch.Tensor:
        """Rows (N, V) of a tree below `tokens`, which an empty cache takes in by three."""
        cache = self.cache()
        done = False
        while not done:
            job, done = cache.prepare(Ask(tree), tokens, 3)
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
        known = all(isinstance(token, int) and 0 <= token < self.source_vocab for token in source)
        if not known or not len(source):
            span = f"0 to {self.source_vocab - 1}"
            raise BadConfig(f"a prompt has at least one token, all of the vocabulary ({span})")
        if len(source) > self.source_context:
            raise PromptTooLong(
                f"the prompt has {len(source)} tokens and the encoder of {self.name} holds "
                f"{self.source_context}; shorten it"
            )

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        """As of Model. Without a request it reads a sample in place of a source, as measurements of
        costs do.
        """
        cache = self.cache_type(self.layout, self.dtype, self.device)
        tokens = self.sample if request is None else request.inputs.get("source")
        self.check_source(tokens)
        key = ("" if request is None else request.tenant, tuple(tokens or ()))
        cache.source = self.sources.get(key) or SourceRows(key[1])
        self.sources[key] = cache.source
        return self.prepared(cache, request, beside)

    def _encoded(self, tokens: Sequence[int]) -> torch.Tensor:
        """The encoder's states (1, S, E)."""
        ids = torch.tensor([list(tokens)], device=self.device)
        out = self.encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
        return out.last_hidden_state  # type: ignore[no-any-return]

    def _source_layers(self, tokens: Sequence[int]) -> Layers:
        """Of each layer of the decoder the keys and values of a source."""
        count = len(tokens)
        # One token runs through the decoder, whose layers then show what they make of the source.
        # Two for a source of one, so that its keys are told from those of the text.
        ids = torch.tensor([[self.start[0]] * (2 if count == 1 else 1)], device=self.device)
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        layers: Layers = []
        states = self._encoded(tokens)
        token = RECORDED.set((count, layers))
        try:
            with attending(self.parts.config, "foretell-source-rows"):
                h = self.parts.embedded(ids, positions)
                self.parts.run(h, positions, range(len(self.parts.layers)), source=states)
        finally:
            RECORDED.reset(token)
        assert len(layers) == len(self.layout), "each layer attends to the source once"
        return layers

    # --- the forward

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Encodes the sources that are new, then runs the decoder."""
        encoded = 0
        with torch_threads(self.threads_wanted or torch.get_num_threads()):
            for job in jobs:
                source: SourceRows = job.cache.source
                if source.layers is None:
                    source.layers = self._source_layers(source.tokens)
                    encoded += len(source.tokens)
            computed = super().compute(jobs, taps)
        computed.width += encoded
        return computed

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        first: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        hidden: dict[int, torch.Tensor] = {}
        layers = range(len(self.layout)) if first.layers is None else first.layers
        with attending(self.parts.config, "foretell-source"):
            states = entering(STEP.get(), self.embed)
            h = self.parts.embedded(ids, positions) if states is None else states[None]
            h = self.parts.run(h, positions, layers, taps, hidden)[0]
        return self.parts.logits(h[rows.long()]), hidden

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        assert self.parts.places is None, "positions enter layer 0 too: it cannot `layers`"
        ids = torch.tensor([list(tokens)], device=self.device)
        return self.parts.embedded(ids, torch.zeros_like(ids))[0]
