"""foretell inside transformers: `model.generate(**inputs,
custom_generate=foretell.hf("token-recycling"))`.

transformers prepares inputs, logits processors and stopping criteria as always; here the prepared
objects are evaluated token by token along each path, so an option means exactly what it means
there. A batch is split into one request a row, without its padding, and put together again. What
cannot be honoured is refused by name, before the first forward where that can be known.
"""

from __future__ import annotations

import copy
import inspect
import threading
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
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretell.api.diagnosis import notice_of_torch
from foretell.core.drafter import Drafter
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.stores import Stores
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import (
    BadConfig,
    ForetellWarning,
    RequestFailed,
    Unsupported,
    first_message_line,
)
from foretell.loading.attached import attached_adapter
from foretell.models.decoder.decoder import Decoder
from foretell.spec import resolve_method
from foretell.speculation.strategy import Strategy

# Fields of a GenerationConfig that cannot be honoured, with the values that ask for nothing.
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
CACHES = ("past_key_values", "cache_params")  # the latter of models without attention
KNOWN = {"attention_mask", "position_ids", *CACHES, "use_cache", "logits_to_keep", "cache_position"}


_turns: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()


def holds_tokens(cache: Any) -> bool:
    """Whether a cache of transformers has taken tokens in, as rows or as a state."""
    for layer in cache.layers:
        row_count = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
        if row_count or any(getattr(layer, "has_previous_state", {}).values()):
            return True
    return False


def hf(
    method: str | Drafter | Strategy = "token-recycling",
    draft: PreTrainedModel | str | Path | None = None,
) -> Hook:
    """Makes what `custom_generate=` of a transformers model's `generate` takes. `draft`: a smaller
    model or its folder.

    Seeds come from torch's generator, so torch.manual_seed repeats a result. Stop strings go into
    `stopping_criteria=[StopStringCriteria(tokenizer, stops)]`: transformers itself refuses
    `stop_strings=` here.
    """
    return Hook(method, draft)


class Hook:
    """The callable that transformers calls. It remembers what drafters learnt of each model."""

    def __init__(
        self, method: str | Drafter | Strategy, draft: PreTrainedModel | str | Path | None
    ):
        if not isinstance(method, str | Drafter | Strategy):
            raise BadConfig.field("method", method, "a spec like 'ngram:n=3', or a config object")
        self.name, self.strategy = resolve_method(method)
        self.draft = draft
        self._stores: WeakKeyDictionary[PreTrainedModel, Stores] = WeakKeyDictionary()

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
        call_arguments = _generate_arguments()
        if streamer is None:
            streamer = call_arguments.get("streamer")
        other_arguments = {"assistant_model": call_arguments.get("assistant_model")} | model_kwargs
        self._refuse_options(model, generation_config, other_arguments)
        if synced_gpus or call_arguments.get("synced_gpus"):
            raise self._refusal_error("synced_gpus")
        pad_counts = self._count_padding(input_ids, model_kwargs)
        prompt_rows = [
            row_ids[pad_count:].tolist()
            for row_ids, pad_count in zip(input_ids.cpu(), pad_counts, strict=True)
        ]
        requests = self._build_requests(
            input_ids,
            pad_counts,
            prompt_rows,
            logits_processor,
            stopping_criteria,
            generation_config,
        )
        criteria = self._other_criteria(stopping_criteria, requests)
        # A forward of ours changes the model's attention while it lasts, so calls take turns.
        with _turns.setdefault(model, threading.RLock()):
            training = model.training
            try:
                engine = self._build_engine(model.eval())
                run = _Run(self, engine, requests, input_ids, criteria, streamer, generation_config)
                outputs = run.collect_outputs()
            finally:
                model.train(training)
        sequences = _pad_outputs(input_ids, outputs, generation_config)
        if streamer is not None:
            streamer.end()
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _build_engine(self, model: PreTrainedModel) -> Engine:
        """A new engine, since the model may have changed, with what drafters learnt before."""
        notice_of_torch(model)
        models: dict[str, Model] = {"target": attached_adapter(model, model.config.model_type)}
        draft_model = self._draft_model()
        if draft_model is not None:
            models["draft"] = draft_model
            vocab_size = models["target"].vocab
            if draft_model.vocab != vocab_size:
                raise BadConfig(
                    f"the draft model has {draft_model.vocab} tokens, the model {vocab_size}: use "
                    "a relative"
                )
        engine = Engine(models)
        engine.stores = self._stores.setdefault(model, engine.stores)
        return engine

    def _build_requests(
        self,
        input_ids: torch.Tensor,
        pad_counts: Sequence[int],
        prompts: Sequence[list[int]],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> list[Request]:
        """Makes a request of each row of the batch."""
        row_count = len(prompts)
        end_tokens = [
            token
            for criterion in criteria
            for token in _token_ids(getattr(criterion, "eos_token_id", None))
        ]
        max_length = min(
            criterion.max_length
            for criterion in criteria
            if isinstance(criterion, MaxLengthCriteria)
        )
        seeds = [0] * row_count
        if config.do_sample:
            seeds = torch.randint(2**62, (row_count,)).tolist()
        requests = []
        for row, prompt in enumerate(prompts):
            padding = input_ids[row, : pad_counts[row]].cpu()
            row_processors = (RowProcessors(processors, padding, row),) if len(processors) else ()
            sampling = Sampling(
                max_new_tokens=max_length - input_ids.shape[1],
                temperature=1.0 if config.do_sample else 0.0,
                stop_token_ids=tuple(end_tokens),
                seed=seeds[row],
                logits_processors=row_processors,
            )
            requests.append(Request(prompt, self.strategy, sampling, self.name))
        return requests

    def _other_criteria(
        self, criteria: StoppingCriteriaList, requests: Sequence[Request]
    ) -> list[StoppingCriteria]:
        """The criteria that the engine does not check itself."""
        other_criteria = []
        for criterion in criteria:
            if not isinstance(criterion, MaxLengthCriteria) and not hasattr(
                criterion, "eos_token_id"
            ):
                other_criteria.append(criterion)
        if other_criteria and len(requests) > 1 and not requests[0].sampling.stop_token_ids:
            raise self._refusal_error(
                "stopping_criteria on a batch without an end token",
                "give eos_token_id and pad_token_id",
            )
        return other_criteria

    def ends_text(self, criterion: StoppingCriteria, token_ids: torch.Tensor) -> bool:
        """Whether a criterion ends the text of ids (1, L)."""
        try:
            # Without `output_scores` transformers, too, gives None for the scores.
            return bool(torch.as_tensor(criterion(token_ids, None)).any())  # type: ignore[arg-type]
        except Exception as error:
            class_name = type(criterion).__name__
            if "NoneType" in str(error):
                raise self._refusal_error(
                    f"the stopping criterion {class_name}, which reads `scores` "
                    f"({first_message_line(error)}): they need output_scores=True"
                ) from error
            raise RequestFailed(
                f"{self.name}: the stopping criterion {class_name} failed "
                f"({type(error).__name__}: {first_message_line(error)})"
            ) from error

    def _draft_model(self) -> Decoder | None:
        if self.draft is None:
            return None
        if isinstance(self.draft, str | Path):
            from foretell.loading.load import load

            model = load(self.draft).models["target"]
            assert isinstance(model, Decoder)
            self.draft = model.hf
        return attached_adapter(self.draft, "the draft model")

    def _refuse_options(
        self, model: PreTrainedModel, config: GenerationConfig, other_arguments: dict[str, Any]
    ) -> None:
        if model.config.is_encoder_decoder:
            raise self._refusal_error("an encoder-decoder model")
        for field_name, allowed_values in REFUSED.items():
            if getattr(config, field_name, None) not in allowed_values:
                raise self._refusal_error(
                    f"{field_name}={getattr(config, field_name)!r}",
                    "leave it out, or leave custom_generate out",
                )
        for field_name, value in other_arguments.items():
            if field_name not in KNOWN and value is not None:
                raise self._refusal_error(field_name, "leave it out, or leave custom_generate out")
        for field_name in CACHES:
            cache = other_arguments.get(field_name)
            if cache is not None and holds_tokens(cache):
                raise self._refusal_error(
                    f"{field_name} that hold tokens", "give the whole prompt as input_ids"
                )

    def _count_padding(self, input_ids: torch.Tensor, model_arguments: dict[str, Any]) -> list[int]:
        """Counts the padding tokens that each row begins with."""
        if input_ids.shape[1] == 0:
            raise self._refusal_error("a prompt without input_ids")
        mask = model_arguments.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
        if (
            mask.shape != input_ids.shape
            or bool((mask.diff(dim=1) < 0).any())
            or not bool(mask[:, -1].all())
        ):
            raise self._refusal_error(
                "an attention_mask with holes or padding on the right", "pad on the left"
            )
        positions = model_arguments.get("position_ids")
        expected = (mask.cumsum(1) - 1) * mask
        if positions is not None and not bool(((positions * mask) == expected).all()):
            raise self._refusal_error("position_ids of your own")
        return (input_ids.shape[1] - mask.sum(1)).tolist()

    def _refusal_error(self, feature: str, cure: str = "leave custom_generate out") -> Unsupported:
        return Unsupported(f"foretell.hf({self.name!r}) cannot honour {feature}; {cure}")


class _Run:
    """A call of `generate`: the engine, the requests of its rows, and what they have written."""

    def __init__(
        self,
        hook: Hook,
        engine: Engine,
        requests: Sequence[Request],
        input_ids: torch.Tensor,
        criteria: Sequence[StoppingCriteria],
        streamer: Any,
        config: GenerationConfig,
    ):
        self.hook = hook
        self.engine = engine
        self.requests = requests
        self.input_ids = input_ids
        self.criteria = criteria
        self.streamer = streamer
        self.pad = _pad_token(config)
        self.lives: list[Live] = []
        self.written: list[list[int]] = [[] for _ in requests]
        self.ended: set[int] = set()  # rows that a criterion ended
        self.streamed = 0  # columns that the streamer has

    def collect_outputs(self) -> list[list[int]]:
        """Writes the texts and returns the new tokens of each row."""
        try:
            for request in self.requests:
                self.lives.append(self.engine.add(request))
            while any(self._running_rows()):
                for event in self.engine.step():
                    row = event.request - self.lives[0].index
                    error = self.lives[row].error
                    if error is not None:
                        raise error
                    self._write_tokens(row, event.tokens)
                if self.streamer is not None:
                    self._stream_columns()
        finally:
            for live in self.lives:
                self.engine.end(live)
        for row, live in enumerate(self.lives):
            is_short = len(self.written[row]) < self.requests[row].sampling.max_new_tokens
            if live.reason == "length" and is_short and row not in self.ended:
                warnings.warn(
                    f"{self.hook.name}: a text ended where the model's context does, "
                    "before max_length",
                    ForetellWarning,
                    stacklevel=5,
                )
        return self.written

    def _running_rows(self) -> list[bool]:
        """Whether each row goes on."""
        return [live in self.engine.live for live in self.lives]

    def _write_tokens(self, row: int, tokens: Sequence[int]) -> None:
        row_tokens = self.written[row]
        for token in tokens:
            if row in self.ended:
                return
            row_tokens.append(token)
            if self.criteria:
                new_tokens = self.input_ids.new_tensor(row_tokens)
                text_ids = torch.cat([self.input_ids[row], new_tokens])[None]
                # All are called, as by transformers: they may keep count.
                verdicts = [self.hook.ends_text(criterion, text_ids) for criterion in self.criteria]
                if any(verdicts):
                    self.ended.add(row)
                    self.engine.end(self.lives[row])

    def _stream_columns(self) -> None:
        """Gives the streamer every column (B,) that is complete."""
        is_running = self._running_rows()
        lengths = [len(row_tokens) for row_tokens in self.written]
        running_lengths = [length for length, runs in zip(lengths, is_running, strict=True) if runs]
        complete_columns = min(running_lengths) if running_lengths else max(lengths)
        for column in range(self.streamed, complete_columns):
            tokens = [
                row_tokens[column] if column < len(row_tokens) else self.pad
                for row_tokens in self.written
            ]
            self.streamer.put(torch.tensor(tokens))
        self.streamed = max(self.streamed, complete_columns)


class RowProcessors:
    """Processors made for a batch, for one row of it. They see the row's padding before its tokens,
    as transformers would show it to them.
    """

    def __init__(self, processors: LogitsProcessorList, padding: torch.Tensor, row: int):
        self.padding = padding[None]
        self.processors = [
            _processor_of_row(processor, len(padding), row) for processor in processors
        ]

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token_ids = torch.cat([self.padding.to(token_ids.device), token_ids], 1)
        for processor in self.processors:
            scores = processor(token_ids, scores)
        return scores


def _processor_of_row(processor: Any, padding: int, row: int) -> Any:
    """Copies, for one row, the two kinds of processor that depend on the row of the batch."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and torch.is_tensor(
        processor.prompt_ignore_length
    ):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = padding
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed_tokens = processor._prefix_allowed_tokens_fn
        processor = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed_tokens(row, ids), 1)
    return processor


def _generate_arguments() -> dict[str, Any]:
    """The arguments of the `generate` that is running.

    transformers 5.23 does not hand `streamer` and `assistant_model` to a callable; ignoring them
    would leave a reader of the streamer waiting for ever.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def _pad_outputs(
    input_ids: torch.Tensor, outputs: Sequence[list[int]], config: GenerationConfig
) -> torch.Tensor:
    """input_ids (B, L) and the new tokens of each row -> (B, L + the most of them)."""
    pad_token = _pad_token(config)
    max_length = max(map(len, outputs))
    rows = [output + [pad_token] * (max_length - len(output)) for output in outputs]
    new_columns = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat([input_ids, new_columns.view(len(input_ids), max_length)], 1)


def _pad_token(config: GenerationConfig) -> int:
    """The token that fills up rows which end before others."""
    for value in (config._pad_token_tensor, config._eos_token_tensor):
        token_ids = _token_ids(value)
        if token_ids:
            return token_ids[0]
    return 0


def _token_ids(value: Any) -> list[int]:
    return [] if value is None else torch.as_tensor(value).flatten().tolist()
