import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import CLIPS, SMALL, small_args

from whisfusion.data.manifest import read_manifest, write_manifest
from whisfusion.errors import OptionError
from whisfusion.train import TrainArgs, main
from whisfusion.train.log import read_csv
from whisfusion.train.prepare import prepare


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    """A line that is not JSON, a missing shard, a language without a token, a recipe with three mistakes."""
    good = {"audio": "a.wav", "duration": 2.0, "text": "hello", "language": "en"}
    lines = [
        "{not json",
        json.dumps(good | {"id": "a", "shard": "gone.tar"}),
        json.dumps(good | {"id": "b", "language": "tlh"}),
        json.dumps(good | {"id": "c", "audio": "gone.wav"}),
    ]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    args = TrainArgs(
        recipe="tiny",
        data=(str(tmp_path / "bad.jsonl"), str(tmp_path / "nowhere.jsonl")),
        out=tmp_path / "run",
        settings={"learning_rat": "1", "floor": "2", "steps": "many"},
        device="cpu",
    )
    with pytest.raises(OptionError) as caught:
        main(args)
    message = str(caught.value)
    for part in (
        "bad.jsonl line 1: not JSON",
        "nowhere.jsonl: no such file",
        "gone.tar does not exist",
        "gone.wav does not exist",
        "1 utterances are in 'tlh', which has no token",
        "no setting 'learning_rat'",
        "floor must be between 0 and 1",
        "steps must be",
    ):
        assert part in message
    assert message.startswith("8 problems, nothing was trained:")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"recipe": "huge"}, "no recipe 'huge': choose one of paper_stage1"),
        ({"data": ()}, "nothing to train on"),
        ({"device": "cuda:7"}, "no device 'cuda:7'"),
        ({"init_from": "no-such-model"}, "no-such-model"),
        ({"settings": SMALL | {"filters.exclude": "*/*"}}, "none of the utterances can be used"),
        ({"settings": SMALL | {"steps": "none", "epochs": "0.1"}}, "warmup_steps 2 must be fewer than the 1 steps"),
        ({"settings": SMALL | {"accumulate": "3"}}, "utterances of 8 does not divide into 3 micro-batches on 1 ranks"),
        ({"settings": SMALL | {"filters.blacklist": "gone.txt"}}, "blacklist gone.txt cannot be read"),
    ],
)
def test_one_mistake_is_one_sentence(change, part, tmp_path):
    with pytest.raises(OptionError) as caught:
        main(replace(small_args(tmp_path / "run"), **change))
    assert part in str(caught.value)
    assert "1 problem, nothing was trained" in str(caught.value)


def test_a_clip_that_fails_is_skipped_counted_and_named(tmp_path, capsys):
    clips = read_manifest(CLIPS)[:15]
    (tmp_path / "broken.wav").write_bytes(b"RIFF but no more than that")
    broken = replace(clips[0], id="broken", audio="broken.wav", shard=None, root=tmp_path)
    lying = replace(clips[1], id="lying", duration=clips[1].duration + 3)
    write_manifest(tmp_path / "clips.jsonl", [*clips, broken, lying])
    args = replace(small_args(tmp_path / "run", steps="none", epochs="2"), data=(str(tmp_path / "clips.jsonl"),))
    assert main(args)
    skipped = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    assert {record["id"] for record in skipped} == {"broken", "lying"}
    assert "broken.wav" in next(r["reason"] for r in skipped if r["id"] == "broken")
    assert "by the manifest" in next(r["reason"] for r in skipped if r["id"] == "lying")
    assert "left out " in capsys.readouterr().err
    assert f"{len(skipped)} clips could not be read" in (tmp_path / "run" / "report.md").read_text()
    assert all(row["loss"] > 0 for row in read_csv(tmp_path / "run" / "log.csv"))


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = TrainArgs(recipe="paper_stage1", data=(str(CLIPS),), dry_run=True, device="cpu")
    settings = {"filters.exclude": "de/*", "sampler.utterances": "32", "warmup_steps": "2"}
    assert main(replace(args, settings=settings))
    said = capsys.readouterr().out
    for part in ("tiny-en", "kept", "36 (12.0 epochs of 3)", "828.2 M", "TFLOP a step", "GB on each rank"):
        assert part in said
    assert os.listdir(tmp_path) == []


def test_the_run_folder_has_a_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(replace(small_args(Path("x")), out=None))
    assert (tmp_path / "runs" / "last" / "model" / "config.json").exists()


def test_dev_clips_that_the_model_cannot_read_are_left_out(tmp_path):
    clips = read_manifest(CLIPS)[:4]
    foreign = [replace(clip, language="zh") if number < 2 else clip for number, clip in enumerate(clips)]
    write_manifest(tmp_path / "dev.jsonl", foreign)
    job = prepare(replace(small_args(tmp_path / "run"), dev=(str(tmp_path / "dev.jsonl"),)))
    assert [clip.id for clip in job.dev] == [clip.id for clip in clips[2:]]
    assert job.notes == ("dev clips in zh are left out: nothing is trained on these languages",)
