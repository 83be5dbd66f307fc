"""LibriSpeech, Common Voice, NeMo and WebDataset into our manifest, packed or left in place."""

import json

import numpy as np
import pytest
import soundfile

from whisfusion.data.importers import ImportOptions, audio_seconds, find_layout, import_corpus
from whisfusion.data.manifest import load_samples, read_manifest
from whisfusion.data.pack import encode_opus
from whisfusion.data.shard import write_shard
from whisfusion.errors import AudioError, LanguageError, ManifestError, OptionError

OPUS_ROOT_MEAN_SQUARE = 0.02  # of a tone whose own is 0.21


def tone(seconds=1.0, rate=16_000):
    return (0.3 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def sound(path, seconds=1.0, rate=16_000):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(seconds, rate), rate)
    return path


@pytest.fixture
def librispeech(tmp_path):
    chapter = tmp_path / "LibriSpeech/dev-clean/84/121123"
    for number, seconds in enumerate((1.5, 2.25)):
        sound(chapter / f"84-121123-000{number}.flac", seconds)
    (chapter / "84-121123.trans.txt").write_text(
        "84-121123-0000 GO DO YOU HEAR\n84-121123-0001 BUT IN LESS\n84-121123-0002 NO SOUND\n84-121123-0003\n"
    )
    return tmp_path / "LibriSpeech"


@pytest.fixture
def commonvoice(tmp_path):
    folder = tmp_path / "cv-corpus/zh-HK"
    for number in range(3):
        sound(folder / f"clips/common_voice_{number}.mp3", 1.0 + number, 32_000)
    rows = [
        ("client_id", "path", "sentence", "age", "locale"),
        ("aa", "common_voice_0.mp3", '"引號', "", "zh-HK"),
        ("bb", "common_voice_1", "二", "", "zh-HK"),
        ("cc", "common_voice_9.mp3", "沒有", "", "zh-HK"),
        ("dd", "", "空", "", "zh-HK"),
    ]
    (folder / "train.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "clip_durations.tsv").write_text(
        "clip\tduration[ms]\ncommon_voice_0.mp3\t1044\ncommon_voice_9.mp3\t1000\n"
    )
    return folder


def test_librispeech(librispeech, tmp_path):
    seen = []
    report = import_corpus(librispeech, tmp_path / "ls.jsonl", progress=lambda *p: seen.append(p))
    first, second = read_manifest(tmp_path / "ls.jsonl")
    assert (first.id, first.text, first.speaker) == ("84-121123-0000", "GO DO YOU HEAR", "84")
    assert (first.language, first.dataset) == ("en", "librispeech")
    assert (first.duration, second.duration) == (1.5, 2.25)
    assert first.audio == "LibriSpeech/dev-clean/84/121123/84-121123-0000.flac"
    assert len(load_samples(second)) == 36_000
    assert [reason.rsplit(": ")[-1] for reason in report.skipped] == [
        "no audio file 84-121123-0002 beside it",
        "no text",
    ]
    assert not report.ok
    assert "2 utterances (en 2)" in report.render()
    assert "left out 2" in report.render()
    assert seen == [(1, 2), (2, 2)]


def test_commonvoice(commonvoice, tmp_path):
    report = import_corpus(commonvoice, tmp_path / "cv.jsonl", ImportOptions(dataset="cv-17"))
    first, second = report.utterances
    assert (first.id, first.text, first.speaker) == ("common_voice_0", '"引號', "aa")
    assert (first.language, first.dataset) == ("yue", "cv-17")
    assert first.duration == 1.044  # as clip_durations.tsv has it
    assert second.duration == pytest.approx(2.0, abs=0.1)
    assert len(load_samples(second)) == pytest.approx(32_000, abs=1600)
    assert len(report.skipped) == 2
    assert import_corpus(commonvoice / "train.tsv", tmp_path / "x.jsonl").utterances[0].dataset == "commonvoice-yue"


def test_commonvoice_without_that_split(commonvoice, tmp_path):
    with pytest.raises(ManifestError, match=r"has no test\.tsv; it has clip_durations, train"):
        import_corpus(commonvoice, tmp_path / "cv.jsonl", ImportOptions(split="test"))
    with pytest.raises(ManifestError, match="no Common Voice table: it has no client_id, path, sentence"):
        import_corpus(commonvoice / "clip_durations.tsv", tmp_path / "cv.jsonl")


def test_nemo_without_language_and_with_names_of_languages(tmp_path):
    sound(tmp_path / "1.wav")
    records = [
        {"audio_filepath": "1.wav", "duration": 1.0, "text": "eins"},
        {"audio_filepath": "1.wav", "duration": 1.0, "text": "one", "source_lang": "en-US", "target_lang": "en-US"},
        {"audio_filepath": "1.wav", "duration": 1.0, "text": "a", "source_lang": "fr", "target_lang": "en"},
        {"audio_filepath": "1.wav", "duration": 1.0, "text": "qapla", "lang": "klingon"},
    ]
    (tmp_path / "nemo.json").write_text("".join(json.dumps(r) + "\n" for r in records))
    report = import_corpus(tmp_path / "nemo.json", tmp_path / "out.jsonl", ImportOptions(language="German"))
    assert [(u.language, u.text) for u in read_manifest(tmp_path / "out.jsonl")] == [("de", "eins"), ("en", "one")]
    assert report.utterances[1].extra == {"target_lang": "en"}
    assert len(report.skipped) == 2
    assert "line 3: a translation" in report.skipped[0]
    assert "line 4: unknown language 'klingon'" in report.skipped[1]


def test_webdataset_with_plain_texts(tmp_path):
    clip = encode_opus(tone(1.5))
    write_shard(tmp_path / "w.tar", [("a.opus", clip), ("a.txt", b"Hallo\n"), ("b.opus", b"x"), ("b.txt", b"y")])
    report = import_corpus(tmp_path / "w.tar", tmp_path / "w.jsonl", ImportOptions(language="de"))
    (utterance,) = read_manifest(tmp_path / "w.jsonl")
    assert (utterance.text, utterance.language, utterance.duration) == ("Hallo", "de", 1.5)
    assert len(report.skipped) == 1
    assert "b.txt" in report.skipped[0]


def test_labels_find_their_audio_by_name(tmp_path):
    sound(tmp_path / "audio/deep/two.v2.wav", 2.0)
    write_shard(tmp_path / "audio/s-0.tar", [("one.opus", encode_opus(tone(1.0)))])
    records = [
        {"id": "one", "duration": 1.0, "text": "a", "language": "en", "logprob": -0.1},
        {"audio_filepath": "/old/two.v2.mp3", "text": "b", "language": "en"},
        {"id": "three", "duration": 1.0, "text": "c", "language": "en"},
    ]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    options = ImportOptions(audio=str(tmp_path / "audio"))
    report = import_corpus(tmp_path / "labels.jsonl", tmp_path / "out.jsonl", options)
    one, two = read_manifest(tmp_path / "out.jsonl")
    assert (one.shard, one.audio, one.extra) == ("audio/s-0.tar", "one.opus", {"logprob": -0.1})
    assert (two.shard, two.audio, two.duration) == (None, "audio/deep/two.v2.wav", 2.0)
    assert [len(load_samples(u)) for u in (one, two)] == [16_000, 32_000]
    assert "no audio called three" in report.skipped[0]


@pytest.mark.parametrize("workers", [1, 4])
def test_packing(librispeech, tmp_path, workers):
    chapter = next(librispeech.rglob("*.trans.txt"))
    sound(chapter.with_name("84-121123-0002.flac"), 0.5, 44_100)
    chapter.with_name("84-121123-0003.flac").write_bytes(b"no sound")
    with open(chapter, "a") as out:
        out.write("84-121123-0003 BROKEN\n")
    options = ImportOptions(pack=True, clips_per_shard=2, workers=workers)
    seen = []
    out = tmp_path / "packed/ls.jsonl"
    report = import_corpus(librispeech, out, options, progress=lambda *p: seen.append(p))
    utterances = read_manifest(out)
    assert [(u.shard, u.audio, u.duration) for u in utterances] == [
        ("ls-000.tar", "000000.opus", 1.5),
        ("ls-000.tar", "000001.opus", 2.25),
        ("ls-001.tar", "000002.opus", 0.5),
    ]
    assert [u.id for u in utterances] == ["84-121123-0000", "84-121123-0001", "84-121123-0002"]
    for utterance in utterances:
        samples = load_samples(utterance)
        assert len(samples) == round(utterance.duration * 16_000)
        middle = slice(1600, -1600)
        error = samples[middle] - tone(utterance.duration)[middle]
        assert np.sqrt((error**2).mean()) < OPUS_ROOT_MEAN_SQUARE
    assert report.shards == 2
    assert any("84-121123-0003" in reason for reason in report.skipped)
    assert seen[-1] == (4, 4)
    assert sorted(p.name for p in out.parent.iterdir()) == ["ls-000.tar", "ls-001.tar", "ls.jsonl"]


def test_layouts_are_recognised(librispeech, commonvoice, tmp_path):
    assert find_layout(librispeech) == "librispeech"
    assert find_layout(commonvoice) == "commonvoice"
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards/a.tar", [])
    assert find_layout(tmp_path / "shards") == "manifest"
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ManifestError, match="no corpus that we know"):
        find_layout(tmp_path / "nothing")
    with pytest.raises(ManifestError, match="does not exist"):
        find_layout(tmp_path / "gone")


def test_nothing_to_import_says_why(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ManifestError, match=r"nothing could be imported(.|\n)*line 1: not JSON"):
        import_corpus(tmp_path / "bad.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_bad_options(librispeech, tmp_path):
    with pytest.raises(OptionError) as caught:
        ImportOptions(clips_per_shard=0, audio=str(tmp_path / "gone"), layout="librispeech")
    for word in ("`clips_per_shard`", "must be a folder", "not for whole corpora"):
        assert word in str(caught.value)
    with pytest.raises(LanguageError, match="klingon"):
        import_corpus(librispeech, tmp_path / "x.jsonl", ImportOptions(language="klingon"))


def test_seconds_of_files(tmp_path):
    assert audio_seconds(str(sound(tmp_path / "a.wav", 1.25, 8000))) == 1.25
    assert audio_seconds(encode_opus(tone(0.75))) == 0.75
    with pytest.raises(AudioError):
        audio_seconds(str(tmp_path / "gone.wav"))
