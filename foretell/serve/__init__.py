"""The server: OpenAI's HTTP interface over one LM, in small files.

    schemas      what may be asked, field by field        keys       who may ask, and how much
    translate    a request to a call of LM.generate       lifecycle  admission, draining, checks
    responses    outputs and pieces to OpenAI's answers   metrics    numbers for Prometheus
    errors       every refusal in OpenAI's shape          app        the routes

Its libraries are those of the extra `serve`; nothing else of foretell needs them.
"""

from __future__ import annotations

from importlib.util import find_spec

from foretell.errors import Unsupported

LIBRARIES = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


def check_installed(*libraries: str) -> None:
    """Raises Unsupported where one of these libraries, or of all that a server needs, is
    missing.
    """
    for name in libraries or LIBRARIES:
        if find_spec(name) is None:
            raise Unsupported(f"{name} is not installed: pip install 'foretell[serve]'")
