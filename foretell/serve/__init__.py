"""The server: OpenAI's HTTP interface over one LM, in small files.

    schemas      what may be asked, field by field
    translate    a request to a call of LM.generate
    responses    outputs and pieces to OpenAI's answers
    scoring      log-probabilities of prompts, for `echo`
    served       the model under its name, and what answers say of it
    service      from a request that was read to its answer
    bodies       requests read within bounds of size; turns: what takes long, client by client
    errors       every refusal in OpenAI's shape
    app          the routes; guard: what stands before them; wire: answers on their way out
    keys         who may ask; limits: how much, and how many may wait
    metrics      numbers for Prometheus
    lifecycle    checks while idle, and an end that lets requests finish
    connections  how long a request may take to come; logs: what is written of it
    settings     what a server allows

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
