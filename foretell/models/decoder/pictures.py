"""Decoders that read pictures: what picture tokens enter layer 0 with comes from the model's own
vision part.

A request brings its pictures as the model's processor gives them (`inputs["pictures"]`: names and
tensors, `pixel_values` and maybe more), and in its prompt as many picture tokens as they take. They
go through the vision part once. After that a picture's tokens are tokens like any others, whose
rows a cache keeps. Positions of several axes are in axes.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.policy import Segment
from foretell.core.model import STEP, Computed
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, Unsupported, first_message_line
from foretell.models.decoder.axes import (
    Axes,
    axes_of,
    draw_pictures,
    restore_deltas,
    rope_index,
    token_kinds,
)
from foretell.models.decoder.decoder import Accelerate, Decoder

if TYPE_CHECKING:
    from foretell.core.request import Request


# What a processor gives beside the pictures.
OF_THE_PROMPT = frozenset({"input_ids", "attention_mask", "mm_token_type_ids"})


def reads_pictures(hf_model: PreTrainedModel) -> bool:
    """Whether it has a vision part and a token that stands for a part of a picture.

    False for those that transformers counts among decoders of text: they are loaded as such.
    """
    picture_token = getattr(hf_model.config, "image_token_id", None)
    has_vision = isinstance(picture_token, int) and callable(
        getattr(hf_model, "get_image_features", None)
    )
    return has_vision and type(hf_model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING


class Pictures:
    """Pictures of one request. `features` (n, E) is None until they were looked at; `axes`: of its
    text's tokens, None where their positions are one number each.
    """

    def __init__(
        self, picture_inputs: Mapping[str, Any], positions: Sequence[int], axes: Axes | None = None
    ):
        self.picture_inputs = picture_inputs
        self.axes = axes
        self.rows = {
            position: row for row, position in enumerate(positions)
        }  # by position in the text
        self.features: torch.Tensor | None = None


class PictureCache(Cache):
    """Rows of a text, and the pictures that its first tokens may stand for."""

    pictures: Pictures | None = None

    def adopt_segment(self, segment: Segment) -> bool:
        """Takes over shared rows as Cache does; False too where its tokens alone do not decide its
        rows.
        """
        return self.pictures is None and super().adopt_segment(segment)


def pictures_of(cache: Cache) -> Pictures | None:
    """The pictures of a cache's text; a cache that copies rows of the target's has those of the
    target.
    """
    if cache.beside is not None and not isinstance(cache, PictureCache):
        return pictures_of(cache.beside)
    return cache.pictures if isinstance(cache, PictureCache) else None


class Pictured(Decoder):
    """A decoder with a vision part, computed by torch. `caps` has "pictures" where a text with one
    has the rows that the model alone gives it; else `pictures_refused` says why it has not.
    """

    cache_type = PictureCache

    def __init__(
        self,
        hf_model: PreTrainedModel,
        model_name: str = "model",
        accelerate: Accelerate | None = None,
    ):
        self.picture_token: int = hf_model.config.image_token_id  # type: ignore[assignment]
        super().__init__(hf_model, model_name, accelerate)
        # By the identity of what was given and its places; they live as long as caches that read
        # them.
        self.known: WeakValueDictionary[Any, Pictures] = WeakValueDictionary()
        self.rope_index = rope_index(hf_model)
        self.pictures_refused = "" if self.loop else "its loop over the layers is its own"
        if self.loop:
            if self.rope_index is not None:
                self.loop.axes = self._forward_axes
            try:
                with torch.inference_mode(), restore_deltas(hf_model):
                    self._test_pictures()
            except Exception as error:  # vision parts take all kinds of pictures
                self.pictures_refused = first_message_line(error)
        if not self.pictures_refused:
            self.caps |= {"pictures"}

    def _test_pictures(self) -> None:
        """A tree after a text with pictures must give the rows of its paths."""
        vision: Any = self.hf.config.vision_config
        if self.rope_index is None:
            image_size = vision.image_size
            noise = torch.randn(
                1, 3, image_size, image_size, generator=torch.Generator().manual_seed(0)
            )
            picture_inputs = {"pixel_values": noise.to(self.device, self.dtype)}
            token_counts = [len(self._picture_features(picture_inputs))]
        else:
            drawn_inputs, token_counts = draw_pictures(vision)
            picture_inputs = {
                input_name: self._to_device(value) for input_name, value in drawn_inputs.items()
            }
        text_ids: list[int] = []
        positions: list[int] = []
        for token, token_count in zip(self.probe_ids, token_counts, strict=False):
            text_ids.append(token)
            positions += range(len(text_ids), len(text_ids) + token_count)
            text_ids += [self.picture_token] * token_count
        text_ids += self.probe_ids[len(token_counts) :]
        tree = TokenTree(text_ids[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        cache = self._cache_with(self._build_pictures(picture_inputs, text_ids, positions))
        finished = False
        while not finished:
            job, finished = cache.prepare(Ask(tree), text_ids, 3)
            reply = self.forward([job])[0]
        for node, row in enumerate(reply.logits):
            path_ids = torch.tensor([[*text_ids, *tree.tokens_to(node)]], device=self.device)
            extra_inputs = (
                {}
                if self.rope_index is None
                else {"mm_token_type_ids": token_kinds(path_ids, positions)}
            )
            if not self.agrees(
                row, self._stock_rows(path_ids, **picture_inputs, **extra_inputs)[-1]
            ):
                raise LookupError("a text with a picture has other rows than the model gives it")

    def check_pictures(self, request: Request) -> None:
        """Raises BadConfig for what are no pictures or do not fit the prompt, and Unsupported for
        videos.
        """
        picture_inputs = request.inputs["pictures"]
        if isinstance(picture_inputs, Mapping):
            for input_name, value in picture_inputs.items():
                if "video" in input_name and value is not None:
                    cure = "give single pictures"
                    raise Unsupported.missing_capability(
                        input_name, self.name, "a model that reads videos", cure
                    )
        has_tensors = isinstance(picture_inputs, Mapping) and "pixel_values" in picture_inputs
        if not has_tensors:
            raise BadConfig.field(
                "pictures",
                type(picture_inputs).__name__,
                "what the processor gives: pixel_values, ...",
            )
        if self.rope_index is not None:
            axes_of(
                self.rope_index,
                request.prompt,
                self._picture_positions(request.prompt),
                picture_inputs,
            )

    # --- what a text with pictures is computed on

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = super().cache(request, beside)
        picture_inputs = None if request is None else request.inputs.get("pictures")
        if request is None or picture_inputs is None or "pictures" not in self.caps:
            return cache  # a draft model without them drafts from the text alone
        positions = self._picture_positions(request.prompt)
        picture_key = (id(picture_inputs), positions)
        pictures = self.known.get(picture_key) or self._build_pictures(
            picture_inputs, request.prompt, positions
        )
        self.known[picture_key] = pictures
        cache.pictures = pictures  # type: ignore[attr-defined]
        return cache

    def _picture_positions(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Positions of the picture tokens in a prompt."""
        return tuple(
            position for position, token in enumerate(prompt_ids) if token == self.picture_token
        )

    def _build_pictures(
        self, picture_inputs: Mapping[str, Any], prompt_ids: Sequence[int], positions: Sequence[int]
    ) -> Pictures:
        index = self.rope_index
        return Pictures(
            picture_inputs,
            positions,
            index and axes_of(index, prompt_ids, positions, picture_inputs),
        )

    def _cache_with(self, pictures: Pictures) -> Cache:
        cache = self.cache_type(self.layout, self.dtype, self.device)
        cache.pictures = pictures
        return cache

    def _to_device(self, value: Any) -> Any:
        """Moves a tensor to the model's device, in its number format."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else None)

    def _picture_features(self, picture_inputs: Mapping[str, Any]) -> torch.Tensor:
        """States (n, E) with which the picture tokens enter layer 0."""
        vision_inputs = {
            input_name: self._to_device(picture_inputs[input_name])
            for input_name in picture_inputs
            if input_name not in OF_THE_PROMPT
        }
        hf_model: Any = self.hf
        vision_output = hf_model.get_image_features(**vision_inputs)
        features = getattr(vision_output, "pooler_output", vision_output)
        if not isinstance(features, torch.Tensor):
            features = torch.cat(list(features))
        return features.reshape(-1, features.shape[-1])

    def _forward_axes(self) -> torch.Tensor | None:
        """Axes (A, T) of the running forward's tokens; None: it has none after pictures."""
        jobs = STEP.get(())
        job_pictures = [pictures_of(job.cache) for job in jobs]
        axes_by_job = [None if pictures is None else pictures.axes for pictures in job_pictures]
        axis_count = next(
            (len(text_axes.prompt) for text_axes in axes_by_job if text_axes is not None), 0
        )
        if not axis_count:
            return None
        job_axes = [
            torch.tensor(job.positions).expand(axis_count, -1)
            if text_axes is None
            else text_axes.of(job.positions)
            for job, text_axes in zip(jobs, axes_by_job, strict=True)
        ]
        return torch.cat(job_axes, 1).to(self.device)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Looks at the pictures that are new, then computes as any decoder.

        Raises BadConfig where a prompt has not the tokens for its pictures.
        """
        for job in jobs:
            pictures = pictures_of(job.cache)
            if pictures is not None and pictures.features is None:
                features = self._picture_features(pictures.picture_inputs)
                if len(features) != len(pictures.rows):
                    raise BadConfig(
                        f"the prompt has {len(pictures.rows)} picture tokens and its pictures "
                        f"take {len(features)}: encode both by the model's processor"
                    )
                pictures.features = features
        return super().compute(jobs, taps)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        h = super().embedded(ids)
        first_row = 0
        for job in STEP.get(()):
            pictures = pictures_of(job.cache)
            positions = []
            picture_rows = []
            for node, (token, position) in enumerate(zip(job.tokens, job.positions, strict=True)):
                feature_rows = {} if pictures is None else pictures.rows
                if token == self.picture_token and position in feature_rows:
                    positions.append(first_row + node)
                    picture_rows.append(feature_rows[position])
            if pictures is not None and picture_rows:
                assert pictures.features is not None, "pictures are looked at before a forward"
                h[0, positions] = pictures.features[picture_rows].to(h)
            first_row += len(job.tokens)
        return h
