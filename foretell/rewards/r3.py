"""Relevance times length times variety: a reward without judgements of people.

An encoder says how near the text is to the prompt (or to a reference answer, for questions that
have one): the product of both means of its last states. That is multiplied by the text's length in
hundreds of words, so that short texts do not win by saying little, and by the share of its trigrams
that are different ones, so that long texts do not win by repeating themselves. With a reference
length counts for nothing, and the relevance is brought to the range that the other product has.

Paper: Hong et al., Rethinking the Role of Proxy Rewards in Language Model Alignment,
arXiv:2402.03469
Guarantee: lossy: a text that is chosen by it has another distribution than a sample
Cost: one forward of the encoder for the texts
Needs: an encoder, a folder of a model of transformers with its tokenizer, such as Contriever's
Trains: nothing
Try: --method best-of --reward r3:encoder=FOLDER
Differs:
- hundreds of words count up to `most`, where the paper's go on without end
- whether a question is open is not classified: give a reference where it has one
- words and signs are told apart by the same pattern as NLTK's wordpunct, without that package
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch

from foretell.core.settings import Range
from foretell.core.text import Written
from foretell.errors import BadConfig, BadModel, first_message_line
from foretell.rewards.base import Reward

LONGEST = 512  # tokens that the encoder reads, the last ones of a longer text
CLOSED = 5.12 / 3.5  # from the range of relevance to references to that of the other product
# After one of these a model goes on with somebody else's turn, or with another document.
ENDS = re.compile(r"\n\n\n\n|\n\n[-_]{2,}|\n(?:Human|User|Assistant|###)")


@dataclass(frozen=True)
class R3(Reward):
    """The encoder's folder, and what counts beside relevance."""

    encoder: str = ""  # folder of the model, and its tokenizer
    reference: Written = ""  # the answer of a question that has one; a spec names a file, @FILE
    length: bool = True  # whether length counts
    variety: bool = True  # whether trigrams count
    most: Annotated[float, Range(0, open_low=True)] = 3.0  # hundreds of words that count; inf: all

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.encoder:
            raise BadConfig("r3: needs an encoder; name a folder, as in r3:encoder=./contriever")

    def scores(self, prompt: str, texts: Sequence[str]) -> list[float]:
        encoder = Encoder.load_encoder(self.encoder)
        reference_mean, *text_means = encoder.mean_states([self.reference or prompt, *texts])
        text_scores = []
        for text, mean in zip(texts, text_means, strict=True):
            score = float(mean @ reference_mean)
            tokens = split_words(ENDS.split(text)[0])
            if self.reference:
                score *= CLOSED
            elif self.length:
                score *= min(self.most, len(tokens) / 100)
            text_scores.append(score * trigram_variety(tokens) if self.variety else score)
        return text_scores


def split_words(text: str) -> list[str]:
    """Splits a text into words, and runs of signs."""
    return re.findall(r"\w+|[^\w\s]+", text)


def trigram_variety(tokens: Sequence[str]) -> float:
    """The share of the trigrams that are different ones; 1 without any."""
    trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return len(set(trigrams)) / len(trigrams) if trigrams else 1.0


class Encoder:
    """A model of transformers whose last states are averaged over a text."""

    def __init__(self, folder: Path):
        from transformers import AutoModel, AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.tokenizer.truncation_side = "left"
            self.model: Any = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True
            ).eval()
        except (OSError, ValueError, LookupError) as error:
            raise BadModel(
                f"{folder}: holds no encoder with its tokenizer ({first_message_line(error)}); "
                "give a folder with config.json, model.safetensors and tokenizer.json"
            ) from error

    @staticmethod
    @cache
    def load_encoder(folder: str) -> Encoder:
        """Returns the encoder of a folder, loaded once."""
        folder_path = Path(folder).expanduser()
        if not folder_path.is_dir():
            raise BadModel(f"r3:encoder={folder!r}: is no folder; give one that holds an encoder")
        return Encoder(folder_path)

    @torch.inference_mode()
    def mean_states(self, texts: Sequence[str]) -> torch.Tensor:
        """Returns the means of the last states (n, E) over each text."""
        encoded_texts = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        hidden_states = self.model(**encoded_texts).last_hidden_state
        token_mask = encoded_texts["attention_mask"][..., None].to(hidden_states)
        mean_vectors: torch.Tensor = (hidden_states * token_mask).sum(1) / token_mask.sum(
            1
        ).clamp_min(1)
        return mean_vectors.double()
