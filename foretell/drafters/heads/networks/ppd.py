"""The rows of Parallel Prompt Decoding: trained embeddings, the same below every node.

Source: Chen et al., "Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of
LLM Inference" (arXiv 2405.18628), section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch

from foretell.drafters.heads.networks.anchored import Anchored

PHRASE = "Next {} words"  # whose tokens the rows are at first


class Ppd(Anchored):
    """Rows, one a depth, that enter the target as if they were tokens' embeddings."""

    kind = "ppd"

    @torch.no_grad()
    def take_weights(self, target: Any) -> None:
        """The embeddings of a phrase's tokens; of the first tokens, where there is no tokenizer."""
        row_count = self.deepest
        tokens = list(range(min(row_count, target.vocab)))
        if target.tokenizer is not None:
            text = PHRASE.format(row_count)
            tokens = target.tokenizer(text, add_special_tokens=False)["input_ids"] or tokens
        phrase_tokens = [tokens[i % len(tokens)] for i in range(row_count)]
        self.vectors.copy_(target.embed(phrase_tokens).to(self.vectors))
