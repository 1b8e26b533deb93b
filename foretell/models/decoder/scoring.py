"""Classifiers of transformers: a decoder's body whose head gives scores in place of logits.

Reward models, value models and judges are stored so (`LlamaForSequenceClassification` and its like,
with `num_labels` scores). They run as a Decoder does, packed and in trees, and by its backends;
row i holds the scores of the text that ends with node i, where transformers gives those of the last
token alone. A head for a decoder that is there already is a views.Scored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from foretell.models.decoder.decoder import Accelerate, Decoder


class Classifier(Decoder):
    """Rows are scores (n, k). `caps` has "scores" in place of "rows".

    `head`: (n, E) normed states -> (n, k), a linear layer; None: the model's own, its `score`.
    Raises Unsupported where the model has none, and for families that Decoder refuses.
    """

    _head_in_words = "a `score` head over its last states"

    def __init__(
        self,
        hf_model: PreTrainedModel,
        model_name: str = "model",
        accelerate: Accelerate | None = None,
        score_head: nn.Module | None = None,
    ):
        self._given_head = score_head
        super().__init__(hf_model, model_name, accelerate)
        self.caps = (self.caps - {"rows"}) | {"scores"}

    def _find_head(self) -> Any:
        return getattr(self.hf, "score", None) if self._given_head is None else self._given_head

    def _row_sizes(self) -> tuple[int, int]:
        embedding: Any = self.hf.get_input_embeddings()
        return int(embedding.weight.shape[0]), int(self.head.out_features)

    def _stock_rows(
        self, token_ids: torch.Tensor, rows: torch.Tensor | None = None, **inputs: Any
    ) -> torch.Tensor:
        body: Any = self.hf.get_decoder()
        states = body(input_ids=token_ids, use_cache=False, **inputs).last_hidden_state[0]
        scores: torch.Tensor = self.head(states if rows is None else states[rows])
        return scores
