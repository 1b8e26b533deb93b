"""Where tensors may be."""

from __future__ import annotations

import torch

from foretell.errors import BadConfig, first_message_line


def check_device(device: str) -> None:
    """Raises BadConfig for a device that is not there, or is no device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadConfig(
            f"device={device!r} cannot be used here: {first_message_line(error)}"
        ) from error
