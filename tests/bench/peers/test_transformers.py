"""transformers as a peer: its own tokens, counted as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

import foretell
from foretell.bench import peers
from foretell.bench.peers import Peer, Place, transformers
from foretell.errors import UnknownMethod
from tests import tiny

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):"


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Peer]:
    folder: Path = tmp_path_factory.mktemp("peer")
    tiny.save(tiny.llama(), folder / "model")
    tiny.save(tiny.relative(tiny.llama()), folder / "draft")
    place = Place(str(folder / "model"), str(folder / "draft"), "float32", "cpu")
    return {peer.name: peer for peer in peers.contenders("transformers", place)}


def test_every_way_gives_the_tokens_of_plain_decoding(ways: dict[str, Peer]) -> None:
    ids = tiny.lm().encode(PROMPT)
    expected = tiny.lm().generate(ids, "plain", max_new_tokens=16).tokens
    assert list(ways) == ["transformers", "transformers prompt lookup", "transformers assisted"]
    for name, way in ways.items():
        run = way.run(ids, 16, 0.0, 0)
        assert run.tokens == expected, name
        assert len(run.times) == len(run.counts)
        assert run.times == sorted(run.times)
        assert run.times[0] > 0
        assert sum(run.counts) >= 16 and way.about and "/" not in way.about, (
            "the report is shown to others"
        )
    assert ways["transformers"].run(ids, 16, 0.0, 0).counts == [1] * 16
    assert len(ways["transformers assisted"].run(ids, 16, 0.0, 0).counts) < 16


@pytest.mark.parametrize("way", [0, 1])
def test_in_a_process_of_its_own_it_counts_the_tokens_of_the_answer(
    way: int, ways: dict[str, Peer], tmp_path: Path
) -> None:
    tiny.save(tiny.llama(), tmp_path / "model")
    place = Place(str(tmp_path / "model"), "no draft", "float32", "cpu", 1, (0,))
    workers = transformers.separate_workers(place)
    assert [worker.name for worker in workers] == ["transformers", "transformers prompt lookup"]
    ids = tiny.lm().encode(PROMPT)
    run = transformers.start(workers[way].options)(ids, 16, 0.0, 0)
    assert run.tokens == list(ways.values())[way].run(ids, 16, 0.0, 0).tokens
    assert sum(run.counts) == len(run.tokens) == 16
    assert len(run.times) == len(run.counts)


def test_a_seed_gives_its_sample_again(ways: dict[str, Peer]) -> None:
    ids, way = tiny.lm().encode(PROMPT), ways["transformers"]
    samples = [way.run(ids, 12, 1.0, seed).tokens for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]


def test_what_the_authors_of_a_model_advise_does_not_change_the_law(tmp_path: Path) -> None:
    hf = tiny.llama()
    hf.generation_config.repetition_penalty, hf.generation_config.max_length = 5.0, 3
    tiny.save(hf, tmp_path)
    ids = tiny.lm().encode(PROMPT)
    way = peers.contenders("transformers", Place(str(tmp_path), None, "float32", "cpu"))[0]
    assert (
        way.run(ids, 12, 0.0, 0).tokens
        == tiny.lm().generate(ids, "plain", max_new_tokens=12).tokens
    )


def test_a_gguf_file_is_unpacked(tmp_path: Path) -> None:
    file = tiny.gguf(tiny.llama(), tmp_path / "model.gguf")
    ids = tiny.lm().encode(PROMPT)
    way = peers.contenders("transformers", Place(str(file), None, "float32", "cpu"))[0]
    assert (
        way.run(ids, 12, 0.0, 0).tokens
        == tiny.lm().generate(ids, "plain", max_new_tokens=12).tokens
    )


def test_peers_are_found_by_their_files() -> None:
    assert "transformers" in peers.peer_names()
    assert "__init__" not in peers.peer_names()
    with pytest.raises(UnknownMethod, match="did you mean transformers"):
        peers.check_peer("transformer")
    package = Path(foretell.__file__).parent / "measure" / "peers"
    assert all(len(path.read_text("utf-8").splitlines()) <= 200 for path in package.glob("*.py"))


def test_a_dot_in_a_name_is_an_underscore_in_the_files() -> None:
    assert {"ctranslate2", "llama.cpp", "openvino", "transformers"} <= set(peers.peer_names())
    peers.check_peer("llama.cpp")
    assert peers.file_stem("llama.cpp") == "llama_cpp"
    with pytest.raises(UnknownMethod, match=r"did you mean llama\.cpp"):
        peers.check_peer("llama_cpp")


def test_beside_int8_it_stays_at_16_bits_and_says_so(tmp_path: Path) -> None:
    tiny.save(tiny.llama(), tmp_path)
    found = peers.contenders("transformers", Place(str(tmp_path), None, "int8", "cpu"))
    assert [peer.name for peer in found] == [
        "transformers bfloat16",
        "transformers bfloat16 prompt lookup",
    ]
    assert {str(peer.hf.dtype) for peer in found} == {"torch.bfloat16"}  # type: ignore[attr-defined]
