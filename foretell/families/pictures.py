"""Decoders that read pictures: what picture tokens enter layer 0 with comes from the model's own
vision part.

A request brings its pictures as the model's processor gives them (`inputs["pictures"]`: names and
tensors, `pixel_values` and maybe more), and in its prompt as many picture tokens as they take. They
go through the vision part once. After that a picture's tokens are tokens like any others, whose
rows a cache keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from foretell.core.cache import Cache
from foretell.core.model import STEP, Computed
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, first_line
from foretell.families.decoder import Accelerate, Decoder
from foretell.memory.job import Job
from foretell.memory.policy import Segment

if TYPE_CHECKING:
    from foretell.core.request import Request


def reads_pictures(hf: PreTrainedModel) -> bool:
    """Whether it has a vision part and a token that stands for a part of a picture.

    False for those that transformers counts among decoders of text: they are loaded as such.
    """
    token = getattr(hf.config, "image_token_id", None)
    sees = isinstance(token, int) and callable(getattr(hf, "get_image_features", None))
    return sees and type(hf.config) not in MODEL_FOR_CAUSAL_LM_MAPPING


class Pictures:
    """Those of one request. `features` (n, E) is None until they were looked at."""

    def __init__(self, given: Mapping[str, Any], places: Sequence[int]):
        self.given = given
        self.rows = {place: row for row, place in enumerate(places)}  # by position in the text
        self.features: torch.Tensor | None = None


class PictureCache(Cache):
    """Rows of a text, and the pictures that its first tokens may stand for."""

    pictures: Pictures | None = None

    def adopt(self, segment: Segment) -> bool:
        """As of Cache; False too where its tokens alone do not decide its rows."""
        return self.pictures is None and super().adopt(segment)


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
        self.pictures_refused = "" if self.loop else "its loop over the layers is its own"
        if self.loop:
            try:
                with torch.inference_mode():
                    self._test_pictures()
            except Exception as error:  # vision parts take all kinds of pictures
                self.pictures_refused = first_line(error)
        if not self.pictures_refused:
            self.caps |= {"pictures"}

    def _test_pictures(self) -> None:
        """A tree behind a text with a picture must give the rows of its paths."""
        size = self.hf.config.vision_config.image_size
        drawn = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
        given = {"pixel_values": drawn.to(self.device, self.dtype)}
        count = len(self._features(given))
        text = [self.probe_ids[0], *[self.picture_token] * count, *self.probe_ids[1:]]
        places = range(1, 1 + count)
        tree = TokenTree(text[-1]).chain([1, 2]).chain([3, 0]).chain([0], at=1)
        cache = self._with(Pictures(given, places))
        done = False
        while not done:
            job, done = cache.prepare(Ask(tree), text, 3)
            reply = self.forward([job])[0]
        for node, row in enumerate(reply.logits):
            path = torch.tensor([[*text, *tree.tokens_to(node)]], device=self.device)
            if not self.agrees(row, self._stock_rows(path, **given)[-1]):
                raise LookupError("a text with a picture has other rows than the model gives it")

    def check_pictures(self, request: Request) -> None:
        """Raises BadConfig for what are no pictures."""
        given = request.inputs["pictures"]
        tensors = isinstance(given, Mapping) and "pixel_values" in given
        if not tensors:
            raise BadConfig.field(
                "pictures", type(given).__name__, "what the processor gives: pixel_values, ..."
            )

    # --- what a text with pictures is computed on

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = super().cache(request, beside)
        given = None if request is None else request.inputs.get("pictures")
        if request is None or given is None:
            return cache
        tokens = enumerate(request.prompt)
        places = tuple(i for i, token in tokens if token == self.picture_token)
        key = (id(given), places)
        known = self.known.get(key) or Pictures(given, places)
        self.known[key] = known
        cache.pictures = known  # type: ignore[attr-defined]
        return cache

    def _with(self, pictures: Pictures) -> Cache:
        cache = self.cache_type(self.layout, self.dtype, self.device)
        cache.pictures = pictures
        return cache

    def _features(self, given: Mapping[str, Any]) -> torch.Tensor:
        """What the picture tokens enter layer 0 with, (n, E)."""
        chosen: dict[str, Any] = {}
        for name, value in given.items():
            if name in ("input_ids", "attention_mask"):
                continue
            wide = isinstance(value, torch.Tensor) and value.is_floating_point()
            chosen[name] = value.to(self.device, self.dtype) if wide else value
        hf: Any = self.hf
        found = hf.get_image_features(**chosen)
        features = getattr(found, "pooler_output", found)
        if not isinstance(features, torch.Tensor):
            features = torch.cat(list(features))
        return features.reshape(-1, features.shape[-1])

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        """Looks at the pictures that are new, then computes as any decoder.

        Raises BadConfig where a prompt has not the tokens for its pictures.
        """
        for job in jobs:
            pictures = job.cache.pictures
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
            pictures = job.cache.pictures
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
