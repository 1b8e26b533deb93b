"""A decoder that reads a part of its rows of a long text: a quick draft of the decoder itself.

A step costs the decoder's weights and the few rows that were chosen (retrieved.py), however long
the text is.

Source: Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical
Speculative Decoding" (arXiv 2404.11912), section 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretell.cache.cache import Cache
from foretell.errors import Unsupported
from foretell.models.decoder.derived import Derived
from foretell.models.decoder.retrieved import RetrievedCache

if TYPE_CHECKING:
    from foretell.core.request import Request


class Retrieving(Derived):
    """The decoder `base` over at most `budget` retrieved rows of a text, in chunks of `chunk`.

    Raises Unsupported for a decoder whose layers are not ours, or see a window of positions only.
    """

    copies_rows = True

    def __init__(self, base: Any, max_rows: int, chunk_size: int):
        reason = base.loop_refused
        if base.loop is not None and any(base.loop.windows):
            reason = "some see a window of it"
        if reason is not None:
            need = f"layers that see all of a text ({reason})"
            cure = "use the method draft"
            raise Unsupported.missing_capability("triforce", base.name, need, cure)
        super().__init__(base, f"{max_rows} retrieved rows")
        self.budget, self.chunk = max_rows, chunk_size
        self.caps = base.caps - {"layers", "parts", "taps"}

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = RetrievedCache(self.layout, self.dtype, self.device, self.budget, self.chunk)
        return self.prepare_cache(cache, request, beside)
