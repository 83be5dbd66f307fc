"""benchmarks/model_scores.py on hypotheses made up here."""

import json
import lzma
from pathlib import Path
from types import ModuleType

import pytest
from conftest import load_benchmark

from whisfusion.data.manifest import Utterance, write_manifest
from whisfusion.evaluate.run import facts_path

SECRET = "unmistakable"


@pytest.fixture(scope="module")
def model_scores() -> ModuleType:
    return load_benchmark("model_scores")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for dataset, language, text in (("english", "en", f"Yes, {SECRET}."), ("chinese", "zh", "汉语")):
        write_manifest(folder / f"{dataset}.jsonl", [Utterance("a", "a.wav", 3.0, text, language, dataset=dataset)])
    return folder


def hypotheses(path: Path, model: str = "1", **texts: str) -> Path:
    """A file as `whisfusion evaluate` writes it, and its facts; the language is always taken for English."""
    path.parent.mkdir(exist_ok=True)
    records = [
        {"id": "a", "dataset": dataset, "text": text, "detected_language": "en"} for dataset, text in texts.items()
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    settings = {"decoding": {"seed": 0}, "model_defaults": {"steps": 3}, "model": {"sha256": model}}
    facts_path(path).write_text(json.dumps({"settings": settings, "machine": {}, "versions": {}}), "utf-8")
    return path


def run(model_scores: ModuleType, out: Path, data: Path, *files: Path, detected: Path | None = None) -> dict:
    more = ["--detected", str(detected)] if detected else []
    model_scores.main([*map(str, files), *more, "--data", str(data), "--out", str(out)])
    return json.loads((out / "scores.json").read_text("utf-8"))


def test_every_figure_is_there_and_no_reference(model_scores: ModuleType, data: Path, tmp_path: Path):
    heard = [
        hypotheses(tmp_path / "h" / "english.jsonl", english="Yes unmist."),
        hypotheses(tmp_path / "h" / "chinese.jsonl", chinese="漢語"),
    ]
    detected = hypotheses(tmp_path / "h" / "heard.jsonl", english="", chinese="")
    out = tmp_path / "result"
    result = run(model_scores, out, data, *heard, detected=detected)
    chinese, english = result["sets"]
    assert (chinese["percent"], chinese["folded"]["percent"], english["folded"]) == (100.0, 0.0, None)
    assert chinese["folded"]["by"].startswith("OpenCC ")
    assert english["detected"] == {"utterances": 1, "right": 1, "mistaken": {}}
    assert chinese["detected"] == {"utterances": 1, "right": 0, "mistaken": {"en": 1}}
    assert (english["written"]["punctuated"]["percent"], english["written"]["cased"]["percent"]) == (50.0, 50.0)
    assert english["written"]["marks"]["."]["f1"] == 100.0
    assert chinese["written"] is None
    kept = {file.name: lzma.decompress(file.read_bytes()) for file in (out / "hypotheses").iterdir()}
    assert set(kept) == {"english.jsonl.xz", "chinese.jsonl.xz", "detected.jsonl.xz"}
    assert SECRET not in (out / "scores.json").read_text("utf-8")
    assert run(model_scores, out, data) == result


def test_another_model_takes_the_place_of_the_first_and_is_not_mixed_with_it(
    model_scores: ModuleType, data: Path, tmp_path: Path
):
    out = tmp_path / "result"
    first = hypotheses(tmp_path / "h" / "all.jsonl", english="Yes", chinese="漢語")
    run(model_scores, out, data, first, detected=first)
    second = hypotheses(tmp_path / "h" / "both.jsonl", "2", english="No", chinese="漢語")
    with pytest.raises(SystemExit, match=r"all\.jsonl was made by another model"):
        run(model_scores, out, data, second, detected=first)
    result = run(model_scores, out, data, second)
    assert result["model_sha256"] == "2"
    assert [part["detected"] for part in result["sets"]] == [None, None]
    result = run(model_scores, out, data, detected=second)
    assert [part["detected"]["right"] for part in result["sets"]] == [0, 1]
