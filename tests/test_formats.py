import json
from pathlib import Path

import pytest

from whisfusion.formats import output_names, to_json, to_txt, write
from whisfusion.transcript import Alternative, Segment, Transcript

SEGMENTS = (
    Segment(0, 0.0, 28.5, "Größe, 大きい.", (1, 2), -0.25, 0.0, (Alternative("Größe", -0.25, 0.5, -0.5),), 0.75),
    Segment(1, 28.5, 40.0, "", (), -0.5, 1.0),
    Segment(2, 40.0, 41.0, "The end.", (3,), -0.5, 0.0),
)
TRANSCRIPT = Transcript("Größe, 大きい. The end.", "de", 41.0, SEGMENTS, {"mel": 0.1})


def test_txt_has_a_line_for_each_segment_that_says_something():
    assert to_txt(TRANSCRIPT) == "Größe, 大きい.\nThe end.\n"


def test_json_has_whispers_names_and_ours_beside_them():
    value = json.loads(to_json(TRANSCRIPT))
    assert value["text"] == TRANSCRIPT.text
    assert value["language"] == "de"
    first, silent, _ = value["segments"]
    assert set(first) >= {"id", "start", "end", "text", "tokens", "avg_logprob", "no_speech_prob"}
    assert first["candidates"] == [{"text": "Größe", "confidence": -0.25, "risk": 0.5, "score": -0.5}]
    assert first["agreement"] == 0.75
    assert "candidates" not in silent
    assert value["confidence"] == pytest.approx(TRANSCRIPT.confidence)
    assert "大きい" in to_json(TRANSCRIPT)


def test_write_makes_the_folder_and_a_file_of_each_format(tmp_path: Path):
    paths = write(TRANSCRIPT, tmp_path / "new" / "folder", "a.b", ("txt", "json"))
    assert [path.name for path in paths] == ["a.b.txt", "a.b.json"]
    assert paths[0].read_text("utf-8") == to_txt(TRANSCRIPT)
    assert paths[1].read_text("utf-8") == to_json(TRANSCRIPT)


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["x/a.wav", "b.mp3", "-"], ["a", "b", "stdin"]),
        (["a.wav", "a.mp3", "b.wav"], ["a.wav", "a.mp3", "b"]),
        (["x/a.wav", "y/a.wav", "z/a.wav"], ["a.wav", "a.wav-2", "a.wav-3"]),
        (["A.wav", "a.WAV"], ["A.wav", "a.WAV-2"]),
        (["talk.v2.wav", "talk.wav"], ["talk.v2", "talk"]),
        (["a.wav", "x/a.wav", "a.wav-2.mp3"], ["a.wav", "a.wav-2", "a.wav-2-2"]),
    ],
)
def test_outputs_are_named_by_stem_and_never_alike(sources: list[str], names: list[str]):
    assert output_names(sources) == names
