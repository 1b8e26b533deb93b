"""A server without a model: the applications that the tests deploy."""

from __future__ import annotations
import asyncio, json, os
from typing import Any

async def app(scope, receive, send):
    body = json.loads((await receive())["body"] or b"{}")
    await asyncio.sleep(body.get("sleep", 0))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json"), (b"x-pid", str(os.getpid()).encode())]})
    try:
        for i in range(body.get("stream", 0)):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            await asyncio.sleep(.1)
    except asyncio.CancelledError:
        open("/tmp/h14/ray/gone","w").write("x"); raise
    await send({"type": "http.response.body", "body": json.dumps({"pid": os.getpid()}).encode()})

def make(): return app
