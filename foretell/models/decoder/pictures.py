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
from foretell.errors import BadConfig, Unsupported, first_line
from foretell.models.decoder.axes import Axes, axes_of, deltas_kept, drawn, kinds, rope_index
from foretell.models.decoder.decoder import Accelerate, Decoder

if TYPE_CHECKING:
    from foretell.core.request import Request


# What a processor gives beside the pictures.
OF_THE_PROMPT = frozenset({"input_ids", "attention_mask", "mm_token_type_ids"})


def reads_pictures(hf: PreTrainedModel) -> bool:
    """Whether it has a vision part and a token that stands for a part of a picture.

    False for those that transformers counts among decoders of text: they are loaded as such.
    """
    token = getattr(hf.config, "image_token_id", None)
    sees = isinstance(token, int) and callable(getattr(hf, "get_image_features", None))
    return sees and type(hf.config) not in MODEL_FOR_CAUSAL_LM_MAPPING


class Pictures:
    """Those of one request. `features` (n, E) is None until they were looked at; `axes`: of its
    text's tokens, None where their positions are one number each.
    """

    def __init__(self, given: Mapping[str, Any], places: Sequence[int], axes: Axes | None = None):
        self.given = given
        self.axes = axes
        self.rows = {place: row for row, place in enumerate(places)}  # by position in the text
        self.features: torch.Tensor | None = None


class PictureCache(Cache):
    """Rows of a text, and the pictures that its first tokens may stand for."""

    pictures: Pictures | None = None

    def adopt(self, segment: Segment) -> bool:
        """As of Cache; False too where its tokens alone do not decide its rows."""
        return self.pictures is None and super().adopt(segment)


def seen_by(cache: Cache) -> Pictures | None:
    """The pictures of a cache's text; one that copies rows of the target's has those of it."""
    if cache.beside is not None and not isinstance(cache, PictureCache):
        return seen_by(cache.beside)
    return cache.pictures if isinstance(cache, PictureCache) else None


class Pictured(Decoder):
    """A decoder with a vision part, computed by torch. `caps` has "pictures" where a text with one
    has the rows that the model alone gives it; else `pictures_refused` says why it has not.
    """

    cache_type = PictureCache

    def __init__(
        self, hf: PreTrainedModel, name: str = "model", accelerate: Accelerate | None = None
    ):
        self.picture_token: int = hf.config.image_token_id  # type: ignore[assignment]
        super().__init__(hf, name, accelerate)
        # By the identity of what was given and its places; they live as long as caches that read
        # them.
        self.known: WeakValueDictionary[Any, Pictures] = WeakValueDictionary()
        self.rope_index = rope_index(hf)
        self.pictures_refused = "" if self.loop else "its loop over the layers is its own"
        if self.loop:
            if self.rope_index is not None:
                self.loop.axes = self._axes
            try:
                with torch.inference_mode(), deltas_kept(hf):
                    self._test_pictures()
            except Exception as error:  # vision parts take all kinds of pictures
                self.pictures_refused = first_line(error)
        if not self.pictures_refused:
            self.caps |= {"pictures"}

    def _test_pictures(self) -> None:
        """A tree behind a text with pictures must give the rows of its paths."""
        vision: Any = self.hf.config.vision_config
        if self.rope_index is None:
            size = vision.image_size
            noise = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
            given = {"pixel_values": noise.to(self.device, self.dtype)}
            counts = [len(self._features(given))]
        else:
            found, counts = drawn(vision)
            given = {name: self._placed(value) for name, value in found.items()}
        text: list[int] = []
        places: list[int] = []
        for token, count in zip(self.probe_ids, counts, strict=False):
            text.append(token)
            places += range(len(text), len(text) + count)
            text += [self.picture_token] * count
        text += self.probe_ids[len(counts) :]
        tree = TokenTree(text[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        cache = self._with(self._pictures(given, text, places))
        done = False
        while not done:
            job, done = cache.prepare(Ask(tree), text, 3)
            reply = self.forward([job])[0]
        for node, row in enumerate(reply.logits):
            path = torch.tensor([[*text, *tree.tokens_to(node)]], device=self.device)
            more = {} if self.rope_index is None else {"mm_token_type_ids": kinds(path, places)}
            if not self.agrees(row, self._stock_rows(path, **given, **more)[-1]):
                raise LookupError("a text with a picture has other rows than the model gives it")

    def check_pictures(self, request: Request) -> None:
        """Raises BadConfig for what are no pictures or do not fit the prompt, and Unsupported for
        videos.
        """
        given = request.inputs["pictures"]
        if isinstance(given, Mapping):
            for name, value in given.items():
                if "video" in name and value is not None:
                    cure = "give single pictures"
                    raise Unsupported.missing(name, self.name, "a model that reads videos", cure)
        tensors = isinstance(given, Mapping) and "pixel_values" in given
        if not tensors:
            raise BadConfig.field(
                "pictures", type(given).__name__, "what the processor gives: pixel_values, ..."
            )
        if self.rope_index is not None:
            axes_of(self.rope_index, request.prompt, self._places(request.prompt), given)

    # --- what a text with pictures is computed on

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = super().cache(request, beside)
        given = None if request is None else request.inputs.get("pictures")
        if request is None or given is None or "pictures" not in self.caps:
            return cache  # a draft model without them drafts from the text alone
        places = self._places(request.prompt)
        key = (id(given), places)
        known = self.known.get(key) or self._pictures(given, request.prompt, places)
        self.known[key] = known
        cache.pictures = known  # type: ignore[attr-defined]
        return cache

    def _places(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Of its picture tokens."""
        return tuple(i for i, token in enumerate(prompt) if token == self.picture_token)

    def _pictures(
        self, given: Mapping[str, Any], prompt: Sequence[int], places: Sequence[int]
    ) -> Pictures:
        index = self.rope_index
        return Pictures(given, places, index and axes_of(index, prompt, places, given))

    def _with(self, pictures: Pictures) -> Cache:
        cache = self.cache_type(self.layout, self.dtype, self.device)
        cache.pictures = pictures
        return cache

    def _placed(self, value: Any) -> Any:
        """A tensor where the model is, in its numbers."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else None)

    def _features(self, given: Mapping[str, Any]) -> torch.Tensor:
        """What the picture tokens enter layer 0 with, (n, E)."""
        chosen = {name: self._placed(given[name]) for name in given if name not in OF_THE_PROMPT}
        hf: Any = self.hf
        found = hf.get_image_features(**chosen)
        features = getattr(found, "pooler_output", found)
        if not isinstance(features, torch.Tensor):
            features = torch.cat(list(features))
        return features.reshape(-1, features.shape[-1])

    def _axes(self) -> torch.Tensor | None:
        """(A, T) of the running forward's tokens; None: it has none behind pictures."""
        jobs = STEP.get(())
        known = [seen_by(job.cache) for job in jobs]
        axes = [None if pictures is None else pictures.axes for pictures in known]
        count = next((len(own.prompt) for own in axes if own is not None), 0)
        if not count:
            return None
        parts = [
            torch.tensor(job.positions).expand(count, -1) if own is None else own.of(job.positions)
            for job, own in zip(jobs, axes, strict=True)
        ]
        return torch.cat(parts, 1).to(self.device)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Looks at the pictures that are new, then computes as any decoder.

        Raises BadConfig where a prompt has not the tokens for its pictures.
        """
        for job in jobs:
            pictures = seen_by(job.cache)
            if pictures is not None and pictures.features is None:
                features = self._features(pictures.given)
                if len(features) != len(pictures.rows):
                    raise BadConfig(
                        f"the prompt has {len(pictures.rows)} picture tokens and its pictures "
                        f"take {len(features)}: encode both by the model's processor"
                    )
                pictures.features = features
        return super().compute(jobs, taps)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        h = super().embedded(ids)
        first = 0
        for job in STEP.get(()):
            pictures = seen_by(job.cache)
            places = []
            rows = []
            for i, (token, position) in enumerate(zip(job.tokens, job.positions, strict=True)):
                seen = {} if pictures is None else pictures.rows
                if token == self.picture_token and position in seen:
                    places.append(first + i)
                    rows.append(seen[position])
            if pictures is not None and rows:
                assert pictures.features is not None, "pictures are looked at before a forward"
                h[0, places] = pictures.features[rows].to(h)
            first += len(job.tokens)
        return h
