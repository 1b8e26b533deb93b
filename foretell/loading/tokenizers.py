"""The tokenizer of a folder or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import first_message_line
from foretell.models.weights import check_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find_tokenizer(
    source: str | Path, revision: str | None, trust_code: bool
) -> PreTrainedTokenizerBase | str:
    """The tokenizer, or why there is none: token ids still work."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it wonders about types of models that it does not know
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=trust_code
        )
    except Exception as error:  # transformers raises nearly anything here
        check_tokenizer(Path(source))
        return first_message_line(error)
    finally:
        logging.set_verbosity(verbosity)
    return tokenizer  # type: ignore[no-any-return]
