"""Decoders with recurrent layers, alone (Mamba) or among layers that attend (Jamba, Qwen3-Next).

The model runs whole, as a twin: a copy of the modules that lead to its recurrent layers, with all
weights and all other modules shared, in which mixers of ours (mixers.py) stand for those layers.
The model itself is not changed. So these decoders take packed requests, chunks and trees as any
other does. What a recurrent layer remembers of a text is held by its cache, and drafts that are
rejected never touch it.

When a model is loaded, rows of a tree after a prompt in pieces, and the row after accepted
drafts, are compared with those of the model's own forward, and these with what its own `generate`
sees.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from foretell.cache.buffers import Layout, Shape
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.policy import Segment
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.models.decoder.decoder import Accelerate, Decoder
from foretell.models.decoder.loop import Loop
from foretell.models.decoder.own import check_torch_alone, own_adapter
from foretell.models.decoder.packed import (
    WHOLE_NUMBERS,
    PackedLinear,
    pack_layers,
    widen_rest,
    without_rounding,
)
from foretell.models.recurrent.mixers import (
    Held,
    Mixer,
    ShortConvolution,
    State,
    StateSpaceDual,
    tensor_bytes,
)
from foretell.models.recurrent.stepwise import DeltaRule, GatedLinear, Selective, SplitDeltaRule
from foretell.native import library

if TYPE_CHECKING:
    from foretell.core.request import Request

# By the name of transformers' class. What they compute is compared with it when a model is loaded.
KINDS: dict[str, type[Mixer]] = {
    "Mamba2Mixer": StateSpaceDual,
    "BambaMixer": StateSpaceDual,
    "FalconH1Mixer": StateSpaceDual,
    "GraniteMoeHybridMambaLayer": StateSpaceDual,
    "NemotronHMamba2Mixer": StateSpaceDual,
    "Zamba2MambaMixer": StateSpaceDual,
    "MambaMixer": Selective,
    "FalconMambaMixer": Selective,
    "JambaMambaMixer": Selective,
    "Qwen3NextGatedDeltaNet": DeltaRule,
    "Qwen3_5GatedDeltaNet": SplitDeltaRule,
    "Qwen3_5MoeGatedDeltaNet": SplitDeltaRule,
    "RecurrentGemmaRecurrentBlock": GatedLinear,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
}

# Families whose every kind of layer the project's tests compare with transformers. They are
# tested when loaded too, but for number formats whose rounding may hide what is right.
PROVEN = frozenset(
    "mamba falcon_mamba mamba2 falcon_h1 bamba granitemoehybrid jamba qwen3_next qwen3_5_text "
    "qwen3_5_moe_text recurrent_gemma lfm2 lfm2_moe".split()
)


class StateCache(Cache):
    """Rows of the layers that attend, and what each recurrent layer remembers of the text.

    States belong to the whole text, so they are neither shared with texts that begin alike nor
    begun with what others computed. `start`: of each recurrent layer, before the first token.
    """

    sharable = False

    def __init__(
        self,
        layout: Sequence[Shape | None],
        dtype: torch.dtype,
        device: torch.device,
        mixers: Mapping[int, Mixer],
        start: Mapping[int, State],
    ):
        self.mixers = mixers
        self.start = start
        self.held = {layer: Held.of(first_state) for layer, first_state in start.items()}
        super().__init__(layout, dtype, device)

    def _clear_scratch(self) -> None:
        super()._clear_scratch()
        for layer_memory in self.held.values():
            layer_memory.clear()

    def fork(self) -> Cache:
        forked = super().fork()
        assert isinstance(forked, StateCache)
        # What they hold is replaced and never written into, so that both may have it.
        forked.held = {layer: replace(layer_memory) for layer, layer_memory in self.held.items()}
        return forked

    def forget(self) -> None:
        super().forget()
        self.held = {layer: Held.of(first_state) for layer, first_state in self.start.items()}

    def adopt_segment(self, segment: Segment) -> bool:
        return False

    @property
    def bytes(self) -> int:
        """The bytes of its rows and of all that recurrent layers hold, the last forward's part
        included.
        """
        total_bytes = super().bytes
        for layer_memory in self.held.values():
            total_bytes += layer_memory.text.bytes + sum(
                tensor_bytes(part) for part in (layer_memory.rows, *layer_memory.steps)
            )
            if layer_memory.ahead is not layer_memory.text:
                total_bytes += layer_memory.ahead.bytes
        return total_bytes

    @torch.inference_mode()
    def keep_nodes(self, nodes: Sequence[int]) -> int:
        """Adds these scratch nodes, a path, to what is remembered.

        All are kept, or none where the path ends among tokens that were pending.
        """
        pending_count = 0 if self.plan is None else self.plan.pending
        if not nodes or len(nodes) < pending_count:
            return 0
        path = [node - pending_count for node in nodes[pending_count:]]
        for layer, layer_memory in self.held.items():
            layer_memory.text = self.mixers[layer].memory_after(layer_memory, path)
        return super().keep_nodes(nodes)

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        job, is_complete = super().prepare(ask, tokens, chunk)
        if self.plan is not None and 0 < self.plan.shared < self.plan.pending:
            # There is no state in the middle of the pending tokens to go on from.
            self._clear_scratch()
            job, is_complete = super().prepare(ask, tokens, chunk)
        return job, is_complete


class Recurrent(Decoder):
    """A transformers causal language model with recurrent layers; takes chains and trees.

    Raises Unsupported, naming the reason, where it cannot be computed right.
    """

    mixers: dict[int, Mixer]  # of each layer with a recurrent part
    start: dict[int, State]  # of each, before the first token
    twin: PreTrainedModel

    def __init__(self, hf_model: PreTrainedModel, model_name: str = "model"):
        output_head: Any = hf_model.get_output_embeddings()
        if isinstance(output_head, PackedLinear) and not hasattr(output_head, "weight"):
            # Mamba's own forward asks for their number format, and for nothing else.
            output_head.weight = torch.empty(0, dtype=hf_model.dtype)
        super().__init__(hf_model, model_name)

    def _measure_layout(self) -> tuple[Layout, list[int | None]]:
        self.mixers = mixers_of(self.hf)
        self.twin = twin_of(self.hf, self.mixers)
        reasons = [mixer.refusal_reason() for mixer in self.mixers.values()]
        for reason in filter(None, reasons):
            raise self._refusal(reason)
        self.start = {
            layer: mixer.first_state(self.dtype, self.device)
            for layer, mixer in self.mixers.items()
        }
        self.state_bytes = sum(start.bytes for start in self.start.values())
        calls = self._attention_calls(exempt_layers=self.mixers)
        layer_count = 1 + max([*calls, *self.mixers])
        layout: Any = tuple(
            calls[layer_index].shape if layer_index in calls else None
            for layer_index in range(layer_count)
        )
        return layout, [
            calls[layer_index].window if layer_index in calls else None
            for layer_index in range(layer_count)
        ]

    def _build_loop(self, windows: list[int | None], accelerate: Accelerate | None) -> Loop | None:
        self.loop_refused = "its recurrent layers run in the model's own loop"
        return None

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = StateCache(self.layout, self.dtype, self.device, self.mixers, self.start)
        return self.prepare_cache(cache, request, beside)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        selection = {"logits_to_keep": row_indices.long()} if self.takes_rows else {}
        mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        with self._use_attention():
            output = self.twin(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=mask,  # 4-D: transformers builds none
                use_cache=False,
                **selection,
            )
        return output.logits[0] if selection else output.logits[0][row_indices.long()], {}

    def self_test(self) -> None:
        is_wide = self.dtype in (torch.float32, torch.float64) and not self.narrow
        if self.config.model_type in PROVEN and not is_wide:
            return
        super().self_test()
        with without_rounding() if self.narrow else nullcontext():
            self._test_accepted()
            self._test_own_steps()

    def _test_accepted(self) -> None:
        """The row after accepted drafts must be the one of the model's own forward."""
        cache = self.cache()
        tree = TokenTree(self.probe_ids[-1]).chain([1, 2]).chain([0], at=1)
        accepted_ids = [*self.probe_ids, 1, 0, 2]
        for ask, tokens in ((Ask(tree), self.probe_ids), (Ask(TokenTree(2)), accepted_ids)):
            job, _ = cache.prepare(ask, tokens, len(tokens))
            reply = self.forward([job])[0]
        full_rows = self._stock_rows(torch.tensor([accepted_ids], device=self.device))
        if cache.length < len(accepted_ids) - 1 or not self.agrees(reply.logits[-1], full_rows[-1]):
            raise self._refusal(
                "a state that goes on after accepted drafts, and a self-test found another one"
            )

    def _test_own_steps(self) -> None:
        """Tests that `generate` sees, token by token, what the model's whole forward gives."""
        token_ids = torch.tensor([self.probe_ids], device=self.device)
        plain_config = GenerationConfig(
            max_new_tokens=3,
            do_sample=False,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        generated = self.hf.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), generation_config=plain_config
        )
        step_rows = torch.cat(list(generated.logits))
        full_rows = self._stock_rows(generated.sequences)[-len(step_rows) - 1 : -1]
        if not self.agrees(step_rows, full_rows):
            raise self._refusal(
                "steps of `generate` with a cache that give the logits of one forward over the "
                "whole text, and a self-test found others"
            )


def mixers_of(hf_model: PreTrainedModel) -> dict[int, Mixer]:
    """Makes the mixer that computes each layer with a recurrent part, by layer."""
    mixers = {}
    for module_name, module in hf_model.named_modules():
        mixer_class = KINDS.get(type(module).__name__)
        if mixer_class is not None:
            layer = next(int(part) for part in module_name.split(".") if part.isdigit())
            mixers[layer] = mixer_class(module, layer)
    return mixers


def twin_of(hf_model: PreTrainedModel, mixers: Mapping[int, Mixer]) -> PreTrainedModel:
    """Copies the model with these mixers in the places of its own.

    Only modules that contain one are copied; weights, configurations and the rest are the model's.
    """
    replacements = {id(mixer.stock): mixer for mixer in mixers.values()}
    parent_ids = {id(hf_model)}
    for module_name, module in hf_model.named_modules():
        if id(module) in replacements:
            name_parts = module_name.split(".")
            parent_ids |= {
                id(hf_model.get_submodule(".".join(name_parts[:part_count])))
                for part_count in range(len(name_parts))
            }
    shared_parts: dict[int, Any] = {
        id(tensor): tensor for tensor in chain(hf_model.parameters(), hf_model.buffers())
    }
    for module in hf_model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            shared_parts[id(config)] = config
        if id(module) not in parent_ids:
            shared_parts[id(module)] = module
    return copy.deepcopy(hf_model, shared_parts | replacements)


def recurrent_adapter(
    hf_model: PreTrainedModel, model_name: str, exact_bits: bool, dtype: str, backend: str
) -> Recurrent | None:
    """The adapter for the options of `load`; None: the model has no recurrent layers.

    Torch alone computes these layers, but for their products, which are packed where the C library
    computes them: of 8 and 4 bits, and of bfloat16 on a CPU. Raises Unsupported for options that
    ask for another way.
    """
    if not is_recurrent(hf_model):
        return None
    cure = "leave it out: torch computes their states"
    check_torch_alone(
        model_name, exact_bits, "auto", backend, "a model without recurrent layers", cure
    )
    is_narrow = hf_model.dtype == torch.bfloat16 and hf_model.device.type == "cpu"
    if is_narrow and dtype not in WHOLE_NUMBERS and backend == "auto" and library.is_available():
        pack_layers(hf_model, "bfloat16")
    if _is_packed(hf_model):
        # In 16 bits the rest would round chunks, trees and single tokens in different ways, which
        # products pass on: texts of drafts would be others than plain ones, one in five.
        widen_rest(hf_model)
    return Recurrent(hf_model, model_name)


def _is_packed(hf_model: PreTrainedModel) -> bool:
    return any(isinstance(module, PackedLinear) for module in hf_model.modules())


def is_recurrent(hf_model: PreTrainedModel) -> bool:
    """Whether it has layers that `Recurrent` computes."""
    return any(type(module).__name__ in KINDS for module in hf_model.modules())


def decoder_of(
    hf_model: PreTrainedModel, model_name: str = "model", accelerate: Accelerate | None = None
) -> Decoder:
    """The adapter of a transformers causal language model. Raises Unsupported."""
    if is_recurrent(hf_model):
        return Recurrent(hf_model, model_name)
    return own_adapter(hf_model, model_name) or Decoder(hf_model, model_name, accelerate)
