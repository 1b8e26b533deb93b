"""foretell inside transformers: `model.generate(**inputs,
custom_generate=foretell.hf("token-recycling"))`.

transformers prepares inputs, logits processors and stopping criteria as always; here the prepared
objects are evaluated token by token along each path, so an option means exactly what it means
there. A batch is split into one request a row, without its padding, and put together again. What
cannot be honoured is refused by name before the first forward.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretell.core.context import Request
from foretell.core.drafter import Drafter
from foretell.core.engine import Engine
from foretell.core.live import Live
from foretell.core.model import Model
from foretell.core.strategy import Strategy
from foretell.core.types import Sampling
from foretell.errors import BadConfig, Unsupported
from foretell.families.decoder import Decoder
from foretell.spec import resolve

# Fields of a GenerationConfig that this cannot honour, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "use_mtp": (None, False),
    "assistant_early_exit": (None,),
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
    "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "cache_implementation": (None, "dynamic", "static"),
}
KNOWN = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}


def hf(
    method: str | Drafter | Strategy = "token-recycling",
    draft: PreTrainedModel | str | Path | None = None,
) -> Hook:
    """What `custom_generate=` of a transformers model's `generate` takes. `draft`: a smaller model
    or its folder.

    Seeds come from torch's generator, so torch.manual_seed repeats a result. Stop strings go into
    `stopping_criteria=[StopStringCriteria(tokenizer, stops)]`: transformers itself refuses
    `stop_strings=` here.
    """
    return Hook(method, draft)


class Hook:
    """The callable; it remembers what drafters learnt of each model."""

    def __init__(
        self, method: str | Drafter | Strategy, draft: PreTrainedModel | str | Path | None
    ):
        if not isinstance(method, str | Drafter | Strategy):
            raise BadConfig.field("method", method, "a spec like 'ngram:n=3', or a config object")
        self.name, self.strategy = resolve(method)
        self.draft = draft
        self._stores: WeakKeyDictionary[PreTrainedModel, dict[Any, Any]] = WeakKeyDictionary()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Called by `generate`: input_ids (B, L), padded on the left -> (B, L + new), or the usual
        output object.
        """
        given = _given()
        streamer = given.get("streamer") if streamer is None else streamer
        self._refuse(
            model,
            generation_config,
            {"assistant_model": given.get("assistant_model")} | model_kwargs,
        )
        if synced_gpus or given.get("synced_gpus"):
            raise self._no("synced_gpus")
        pads = self._pads(input_ids, model_kwargs)
        training = model.training
        try:
            target: Model = Decoder(model, model.config.model_type)
            second = self._second()
            if second is not None and second.vocab != target.vocab:
                raise BadConfig(
                    f"the draft model has {second.vocab} tokens, the model {target.vocab}: use a relative"
                )
            # A new engine, since the model may have changed, with what drafters learnt of it
            # before.
            engine = Engine({"target": target} | ({"draft": second} if second is not None else {}))
            engine.stores = self._stores.setdefault(model, engine.stores)
            outputs = self._run(
                engine,
                input_ids,
                pads,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
            )
        finally:
            model.train(training)
        pad = _first(generation_config._pad_token_tensor, generation_config._eos_token_tensor)
        longest = max(map(len, outputs))
        rows = [output + [pad] * (longest - len(output)) for output in outputs]
        new = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device).view(
            len(input_ids), longest
        )
        sequences = torch.cat([input_ids, new], 1)
        if streamer is not None:
            streamer.end()
        return (
            GenerateDecoderOnlyOutput(sequences=sequences)
            if generation_config.return_dict_in_generate
            else sequences
        )

    def _run(
        self,
        engine: Engine,
        input_ids: torch.Tensor,
        pads: Sequence[int],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
    ) -> list[list[int]]:
        """The new tokens of each row."""
        ends: list[int] = [int(t) for c in criteria for t in _ids(getattr(c, "eos_token_id", None))]
        limit = (
            min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))
            - input_ids.shape[1]
        )
        checks = [
            c
            for c in criteria
            if not isinstance(c, MaxLengthCriteria) and not hasattr(c, "eos_token_id")
        ]
        if checks and not ends and len(input_ids) > 1:
            raise self._no(
                "stopping_criteria on a batch without an end token",
                "give eos_token_id and pad_token_id",
            )
        seeds = (
            torch.randint(2**62, (len(input_ids),)).tolist()
            if config.do_sample
            else [0] * len(input_ids)
        )
        lives: list[Live] = []
        try:
            for row, (ids, pad) in enumerate(zip(input_ids.cpu(), pads, strict=True)):
                own = (Row(processors, ids[:pad], row),) if len(processors) else ()
                sampling = Sampling(
                    max_new_tokens=limit,
                    temperature=1.0 if config.do_sample else 0.0,
                    stop_token_ids=tuple(ends),
                    seed=seeds[row],
                    logits_processors=own,
                )
                lives.append(
                    engine.add(Request(ids[pad:].tolist(), self.strategy, sampling, self.name))
                )
            outputs: list[list[int]] = [[] for _ in lives]
            sent, stopped = 0, set[int]()
            while any(live in engine.live for live in lives):
                for event in engine.step():
                    row = event.request - lives[0].index
                    if (error := lives[row].error) is not None:
                        raise error
                    for token in event.tokens:
                        if row not in stopped:
                            outputs[row].append(token)
                            if checks and self._stopped(checks, input_ids[row], outputs[row]):
                                stopped.add(row)
                                engine.end(lives[row])
                if streamer is not None:
                    sent = _stream(
                        streamer, outputs, [live in engine.live for live in lives], sent, config
                    )
        finally:
            for live in lives:
                engine.end(live)
        for live, output in zip(lives, outputs, strict=True):
            if (
                live.reason == "length"
                and live.index - lives[0].index not in stopped
                and len(output) < limit
            ):
                warnings.warn(
                    f"{self.name}: a text ended where the model's context does, before max_length",
                    stacklevel=4,
                )
        return outputs

    @staticmethod
    def _stopped(checks: Sequence[Any], prompt: torch.Tensor, output: list[int]) -> bool:
        ids = torch.cat([prompt, prompt.new_tensor(output)])[None]
        return any(bool(torch.as_tensor(check(ids, None)).any()) for check in checks)

    def _second(self) -> Decoder | None:
        if self.draft is None:
            return None
        if isinstance(self.draft, str | Path):
            from foretell.loading import load

            model = load(self.draft).models["target"]
            assert isinstance(model, Decoder)
            self.draft = model.hf
        return Decoder(self.draft, "the draft model")

    def _refuse(
        self, model: PreTrainedModel, config: GenerationConfig, others: dict[str, Any]
    ) -> None:
        if model.config.is_encoder_decoder:
            raise self._no("an encoder-decoder model")
        for name, fine in REFUSED.items():
            if getattr(config, name, None) not in fine:
                raise self._no(
                    f"{name}={getattr(config, name)!r}",
                    "leave it out, or leave custom_generate out",
                )
        for name, value in others.items():
            if name not in KNOWN and value is not None:
                raise self._no(name, "leave it out, or leave custom_generate out")
        cache = others.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise self._no("past_key_values that hold tokens", "give the whole prompt as input_ids")

    def _pads(self, input_ids: torch.Tensor, given: dict[str, Any]) -> list[int]:
        """How many padding tokens each row begins with."""
        if input_ids.shape[1] == 0:
            raise self._no("a prompt without input_ids")
        mask = given.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
        if (
            mask.shape != input_ids.shape
            or bool((mask.diff(dim=1) < 0).any())
            or not bool(mask[:, -1].all())
        ):
            raise self._no(
                "an attention_mask with holes or padding on the right", "pad on the left"
            )
        positions = given.get("position_ids")
        expected = (mask.cumsum(1) - 1) * mask
        if positions is not None and not bool(((positions * mask) == expected).all()):
            raise self._no("position_ids of your own")
        return (input_ids.shape[1] - mask.sum(1)).tolist()

    def _no(self, what: str, cure: str = "leave custom_generate out") -> Unsupported:
        return Unsupported(f"foretell.hf({self.name!r}) cannot honour {what}; {cure}")


class Row:
    """Processors made for a batch, for one row of it: they see the row's padding in front of its
    tokens, as ever.
    """

    def __init__(self, processors: LogitsProcessorList, padding: torch.Tensor, row: int):
        self.padding, self.processors = (
            padding[None],
            [_of_row(p, len(padding), row) for p in processors],
        )

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([self.padding.to(ids.device), ids], 1)
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores


def _of_row(processor: Any, padding: int, row: int) -> Any:
    """The two kinds of processor that know which row of the batch they are at, for one row."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and torch.is_tensor(
        processor.prompt_ignore_length
    ):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = padding
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        processor = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    return processor


def _given() -> dict[str, Any]:
    """The arguments of the `generate` that is running.

    transformers 5.23 forgets `streamer` and `assistant_model` on the way to a callable; ignoring
    them would leave a reader of the streamer waiting for ever.
    """
    frame = inspect.currentframe()
    while frame is not None and not (
        frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals
    ):
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _stream(
    streamer: Any, outputs: list[list[int]], going: list[bool], sent: int, config: GenerationConfig
) -> int:
    """Puts every column (B,) that is complete; returns how many are out."""
    pad = _first(config._pad_token_tensor, config._eos_token_tensor)
    open_ = [len(output) for output, goes in zip(outputs, going, strict=True) if goes]
    ready: int = min(open_) if open_ else max(len(output) for output in outputs)
    for column in range(sent, ready):
        streamer.put(
            torch.tensor([output[column] if column < len(output) else pad for output in outputs])
        )
    return max(sent, ready)


def _ids(value: Any) -> list[int]:
    return [] if value is None else torch.as_tensor(value).flatten().tolist()


def _first(*values: Any) -> int:
    return next((int(ids[0]) for ids in map(_ids, values) if ids), 0)
