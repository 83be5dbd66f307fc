"""The whole of learning, small: 64 clips are learned by heart, and read back through the exported model."""

import random
from pathlib import Path

import pytest
from small_run import CLIPS

import whisfusion
from whisfusion.data.manifest import read_manifest, write_manifest
from whisfusion.data.utterance import Utterance, load_samples
from whisfusion.normalise import edit_distance, units
from whisfusion.train import TrainArgs, main
from whisfusion.train.log import read_csv


@pytest.fixture(scope="module")
def clips() -> list[Utterance]:
    return read_manifest(CLIPS)[:64]


@pytest.fixture(scope="module")
def run(clips, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_manifest(folder / "clips.jsonl", clips)
    data = (str(folder / "clips.jsonl"),)
    assert main(TrainArgs(recipe="tiny", data=data, dev=data, out=folder / "run", device="cpu"))
    return folder / "run"


@pytest.fixture(scope="module")
def heard(run, clips) -> list[str]:
    """What the exported model makes of every clip, by parallel diffusion decoding."""
    transcriber = whisfusion.load(run / "model", device="cpu")
    samples = [load_samples(clip) for clip in clips]
    transcripts = transcriber.transcribe(samples, language="en", candidates=2, steps=3)
    return [transcript.text for transcript in transcripts]


def word_error_rate(texts: list[str], references: list[str]) -> float:
    pairs = [(units(text, "en"), units(reference, "en")) for text, reference in zip(texts, references, strict=True)]
    edits = sum(edit_distance(text, reference) for text, reference in pairs)
    return edits / sum(len(reference) for _, reference in pairs)


def test_the_loss_falls_below_a_tenth(run):
    rows = read_csv(run / "log.csv")
    assert rows[0]["loss"] > 5
    assert rows[-1]["loss"] < 0.1


def test_decoding_reads_the_clips_back(heard, clips):
    assert word_error_rate(heard, [clip.text for clip in clips]) < 0.05


def test_with_the_audio_shuffled_it_fails(heard, clips):
    """What it says comes from the sound: paired with other clips' sound, its words are wrong."""
    shuffled = heard.copy()
    random.Random(0).shuffle(shuffled)
    assert word_error_rate(shuffled, [clip.text for clip in clips]) > 0.8


def test_an_adapter_that_learns_alone_is_judged_by_its_spelling(tmp_path):
    settings = {"decoder.adapter": "1", "decoder.reach": "3", "learns": "adapter", "steps": "4", "warmup_steps": "1"}
    data = (str(CLIPS),)
    assert main(TrainArgs(recipe="tiny", data=data, dev=data, out=tmp_path, device="cpu", settings=settings))
    [dev] = read_csv(tmp_path / "dev.csv")
    # It has learned nothing yet, and what it spells is not words.
    assert dev["wer"] >= 0.9


def test_the_dev_set_was_read_during_training(run):
    assert read_csv(run / "dev.csv")[-1]["wer"] < 0.05
    assert "heard: yellow monkeys" in (run / "samples" / "step-00000220.txt").read_text()


def test_a_run_folder_has_all_its_parts(run):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.json",
        "log.csv",
        "dev.csv",
        "dev_sets.csv",
        "samples",
        "tensorboard",
        "checkpoints",
        "best",
        "model",
        "loss.png",
        "wer.png",
        "report.md",
    }
    assert "Dev WER 0.00 %" in (run / "report.md").read_text()


def test_fine_tuning_starts_where_the_model_is(run, clips, tmp_path):
    """Weights alone, another recipe: the architecture is the model's, the loss what it had learned."""
    write_manifest(tmp_path / "clips.jsonl", clips)
    settings = {"steps": "2", "warmup_steps": "1", "log_every": "1", "sampler.utterances": "32"}
    args = TrainArgs(
        recipe="finetune",
        data=(str(tmp_path / "clips.jsonl"),),
        out=tmp_path / "run",
        init_from=str(run / "model"),
        settings=settings | {"spec_augment.bands": "0", "spec_augment.spans": "0", "sampler.speeds": "1"},
        device="cpu",
    )
    assert main(args)
    rows = read_csv(tmp_path / "run" / "log.csv")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["loss"] < 0.2
