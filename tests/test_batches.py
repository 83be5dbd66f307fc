"""benchmarks/batches.py on a tiny model."""

import json

import pytest
import soundfile
from conftest import RATE, hum, load_benchmark

from whisfusion.data.manifest import Utterance, write_manifest


@pytest.fixture(scope="module")
def batches():
    return load_benchmark("batches")


def test_the_first_size_is_what_others_are_compared_with(batches, tiny_model, tmp_path):
    for number in range(3):
        soundfile.write(tmp_path / f"{number}.wav", hum(1.0 + number, number), RATE)
    clips = [Utterance(str(n), f"{n}.wav", 1.0 + n, "a few words", "en") for n in range(3)]
    write_manifest(tmp_path / "set.jsonl", clips)
    out = tmp_path / "batches.json"
    batches.main([str(tiny_model), "--data", str(tmp_path / "set.jsonl"), "--sizes", "1", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [(row["batch"], row["differ"], row["share"]) for row in result["rows"]] == [(1, 0, 0.0), (2, 0, 0.0)]
    assert result["rows"][0]["wer"] == result["rows"][1]["wer"] > 0
    assert str(tmp_path) not in json.dumps(result)


def test_clips_that_differ_are_counted(batches):
    class Changing:
        def transcribe(self, clips, *, language, batch_size, proofread):
            texts = ["a few words"] * (len(clips) - batch_size // 2) + ["a view"] * (batch_size // 2)
            return [type("Transcript", (), {"text": text}) for text in texts]

    clips = [Utterance(str(n), "", 1.0, "a few words", "en") for n in range(4)]
    rows = list(batches.measure(Changing(), clips, [hum(1.0)] * 4, (1, 2)))
    assert [row["clips_that_differ"] for row in rows] == [[], ["3"]]
    assert [row["wer"] for row in rows] == [0.0, pytest.approx(100 * 2 / 12, abs=1e-3)]
