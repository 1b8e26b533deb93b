"""OpenVINO GenAI as a peer: what it is called with, and what comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.bench import peers
from foretell.bench.peers import Place
from foretell.errors import Unsupported
from tests.bench.peers import fakes

GENAI = '''
import json
from pathlib import Path

class StreamingStatus:
    RUNNING = 0

class StreamerBase:
    def __init__(self):
        self.ready = True

class GenerationConfig:
    def __init__(self, **how):
        self.__dict__.update(how)

class TokenizedInputs:
    def __init__(self, ids, mask):
        assert ids.values.shape == mask.values.shape and mask.values.all()
        self.ids = ids.values[0].tolist()

def draft_model(path, device, **how):
    return [path, device, how]

class LLMPipeline:
    """Counts up from the last token; three tokens a step where something drafts."""

    def __init__(self, path, device, **how):
        self.path, self.opened = Path(path), how | {"device": device}

    def generate(self, inputs, config, streamer):
        print("what a library prints is no answer")
        assert streamer.ready
        asked = {k: sorted(v) if isinstance(v, set) else v for k, v in vars(config).items()}
        (self.path / "called.json").write_text(json.dumps({"opened": self.opened, "asked": asked}))
        token, left = inputs.ids[-1], config.max_new_tokens
        drafts = {"prompt_lookup", "draft_model"} & set(self.opened)
        while left:
            step = []
            for _ in range(min(left, 3 if drafts else 1)):
                token += 1
                step.append(token)
                if token in config.stop_token_ids:
                    break
            left = 0 if token in config.stop_token_ids else left - len(step)
            assert streamer.write(step if drafts else step[0]) == StreamingStatus.RUNNING
        streamer.write([])
        streamer.end()
'''
OPENVINO = """
class Tensor:
    def __init__(self, values):
        self.values = values
"""
EXPORTER = """
import json, sys
from pathlib import Path
if __name__ == "__main__":
    Path(sys.argv[-1]).mkdir()
    (Path(sys.argv[-1]) / "asked.json").write_text(json.dumps(sys.argv[1:-1]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    files = {
        "openvino_genai.py": GENAI,
        "openvino.py": OPENVINO,
        "optimum/__init__.py": "",
        "optimum/commands/__init__.py": "",
        "optimum/commands/optimum_cli.py": EXPORTER,
    }
    fakes.install(tmp_path, files, monkeypatch)
    (tmp_path / "small").mkdir()
    return Place(str(tmp_path / "model"), str(tmp_path / "small"), "bfloat16", "cpu", 3, (9,))


@pytest.mark.parametrize(
    ("dtype", "kind", "precision"),
    [("bfloat16", "fp16", "bf16"), ("int8", "int8", None), ("int4", "int4", None)],
)
def test_the_three_ways(
    place: Place, dtype: str, kind: str, precision: str | None, tmp_path: Path
) -> None:
    found = peers.contenders("openvino", Place(place.model, place.draft, dtype, "cpu", 3, (9,)))
    name = f"openvino {dtype}"
    assert [peer.name for peer in found] == [name, f"{name} prompt lookup", f"{name} draft"]
    assert all(f"{kind} weights" in peer.about and "3 threads" in peer.about for peer in found)
    assert not any(str(tmp_path) in peer.about for peer in found), "the report is shown to others"
    outs = {
        path.name.split("-")[0]: path
        for path in (tmp_path / "cache" / "peers" / "openvino" / "models").iterdir()
    }
    asked = json.loads((outs["model"] / "asked.json").read_text())
    assert asked == [
        "export",
        "openvino",
        "--model",
        place.model,
        "--task",
        "text-generation-with-past",
        "--weight-format",
        kind,
        *(["--group-size", "32", "--ratio", "1.0"] if kind == "int4" else []),
    ]
    how: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 3}
    how |= {"INFERENCE_PRECISION_HINT": precision} if precision else {}
    special = [
        ({}, {}),
        ({"prompt_lookup": True}, {"num_assistant_tokens": 5, "max_ngram_size": 3}),
        ({"draft_model": [str(outs["small"]), "CPU", how]}, {"num_assistant_tokens": 5}),
    ]
    for peer, (opened, config) in zip(found, special, strict=True):
        run = peer.run([4, 5], 6, 0.0, 7)
        assert run.tokens == [6, 7, 8, 9] and run.counts == ([3, 1] if opened else [1, 1, 1, 1]), (
            "9 ends a text"
        )
        called = json.loads((outs["model"] / "called.json").read_text())
        assert called["opened"] == {"device": "CPU", **how, **opened}
        assert called["asked"] == {"max_new_tokens": 6, "stop_token_ids": [9], **config}
    assert found[0].run([1], 2, 0.5, 8).tokens == [2, 3]
    called = json.loads((outs["model"] / "called.json").read_text())
    assert called["asked"] == {
        "max_new_tokens": 2,
        "stop_token_ids": [9],
        "do_sample": True,
        "temperature": 0.5,
        "rng_seed": 8,
    }
    fakes.close(found)


def test_without_a_draft_and_formats_that_it_lacks(place: Place) -> None:
    assert len(peers.contenders("openvino", Place(place.model, None, "float32", "cpu"))) == 2
    with pytest.raises(Unsupported, match=r"float64.*choose another --dtype"):
        peers.contenders("openvino", Place(place.model, None, "float64", "cpu"))


def test_the_real_one_decodes_as_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.same_as_ours("openvino", True, tmp_path, monkeypatch)
