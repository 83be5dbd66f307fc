"""benchmarks/stages.py on hypotheses made up here."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from conftest import load_benchmark

from whisfusion.data.manifest import Utterance, write_manifest
from whisfusion.evaluate.run import facts_path

SECRET = "unmistakable"


@pytest.fixture(scope="module")
def stages() -> ModuleType:
    return load_benchmark("stages")


def write_hypotheses(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"id": "a", "dataset": "english", "text": text}) + "\n", "utf-8")
    settings = {"decoding": {"seed": 0}, "model_defaults": {}, "model": {"sha256": path.parent.parent.name}}
    facts_path(path).write_text(json.dumps({"settings": settings, "machine": {}, "versions": {}}), "utf-8")


def test_every_model_and_number_of_steps_is_scored_and_kept_without_references(stages: ModuleType, tmp_path: Path):
    work, out, data = tmp_path / "work", tmp_path / "result", tmp_path / "data"
    write_manifest(data / "english.jsonl", [Utterance("a", "a.wav", 3.0, f"Oh, {SECRET}.", "en", dataset="english")])
    for folder, text in (
        ("2-base_stage2/n1", "Oh no."),
        ("2-base_stage2/n2", f"Oh {SECRET}"),
        ("3-other/n1", "Eh no."),
    ):
        write_hypotheses(work / folder / "english.jsonl", text)

    stages.main([str(work), "--data", str(data), "--out", str(out), "--note", "small"])
    result = json.loads((out / "result.json").read_text("utf-8"))
    found = {(row["model"], row["n"]): row["percent"] for row in result["rows"]}
    assert found == {("base_stage2", 1): 50.0, ("base_stage2", 2): 0.0, ("other", 1): 100.0}
    assert result["runs"]["other-n1"]["model_sha256"] == "3-other"
    assert SECRET not in (out / "result.json").read_text("utf-8")
    assert sorted(file.name for file in (out / "hypotheses").iterdir()) == [
        "base_stage2-n1.jsonl.xz",
        "base_stage2-n2.jsonl.xz",
        "other-n1.jsonl.xz",
    ]

    stages.main(["--data", str(data), "--out", str(out)])
    assert json.loads((out / "result.json").read_text("utf-8")) == result


def test_a_folder_without_hypotheses_is_refused(stages: ModuleType, tmp_path: Path):
    (tmp_path / "data").mkdir()
    with pytest.raises(SystemExit, match="no hypotheses"):
        stages.main([str(tmp_path), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")])
