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
    """One row for each depth, which enters the target as if it were a token's embedding."""

    kind = "ppd"

    @torch.no_grad()
    def begin(self, target: Any) -> None:
        """The embeddings of a phrase's tokens; of the first tokens, where there is no tokenizer."""
        count = self.deepest
        tokens = list(range(min(count, target.vocab)))
        if target.tokenizer is not None:
            text = PHRASE.format(count)
            tokens = target.tokenizer(text, add_special_tokens=False)["input_ids"] or tokens
        chosen = [tokens[i % len(tokens)] for i in range(count)]
        self.vectors.copy_(target.embed(chosen).to(self.vectors))
