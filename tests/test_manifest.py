"""Manifests read and written, shards read at random, from threads and forked processes."""

import io
import json
import lzma
import multiprocessing
import os
import pickle
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from whisfusion.data import shard as shard_module
from whisfusion.data.manifest import (
    Utterance,
    load_samples,
    missing_audio,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from whisfusion.data.shard import read_member, shard_index, write_shard
from whisfusion.errors import AudioError, ManifestError

LINES_PER_SECOND = 20_000  # a fifth of what an idle core does
PCM16_STEP = 2 / 2**15

RECORD = {
    "id": "a-1",
    "shard": "a-000.tar",
    "audio": "000001.opus",
    "duration": 4.5,
    "text": "„Ça va?“ 図書館 \u2028 end",
    "language": "fr",
    "speaker": "s1",
    "dataset": "a",
}


def write_lines(path, *records):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


def wav(seconds, rate=16_000, pitch=440.0):
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(seconds, rate, pitch), rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def tone(seconds, rate=16_000, pitch=440.0):
    return (0.3 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def test_our_own_format(tmp_path):
    (utterance,) = read_manifest(write_lines(tmp_path / "a.jsonl", RECORD | {"gender": "f", "score": [1, 2]}))
    assert utterance == Utterance(**RECORD, extra={"gender": "f", "score": [1, 2]}, root=tmp_path)
    assert utterance.file == str(tmp_path / "a-000.tar")
    assert utterance.audio_path == str(tmp_path / "a-000.tar/000001.opus")


def test_least_record_gets_defaults(tmp_path):
    record = {"audio": "x/1.wav", "duration": 2, "text": "", "language": "en"}
    (utterance,) = read_manifest(write_lines(tmp_path / "small.jsonl", record))
    assert utterance == Utterance("x/1.wav", "x/1.wav", 2.0, "", "en", "", "small", root=tmp_path)


@pytest.mark.parametrize("key", ["lang", "source_lang"])
def test_nemo_names(tmp_path, key):
    record = {"audio_filepath": "/data/1.wav", "duration": 2.5, "offset": 3.0, "text": "hi", key: "en", "pnc": "no"}
    (utterance,) = read_manifest(write_lines(tmp_path / "nemo.json", record))
    assert (utterance.audio, utterance.start, utterance.language) == ("/data/1.wav", 3.0, "en")
    assert utterance.id == "/data/1.wav@3.0"
    assert utterance.extra == {"pnc": "no"}


def test_round_trip_in_both_styles(tmp_path):
    (utterance,) = read_manifest(write_lines(tmp_path / "a.jsonl", RECORD | {"start": 1.5, "gender": "f"}))
    for name, style in (("ours.jsonl", "whisfusion"), ("nemo.jsonl.xz", "nemo"), ("zip.jsonl.gz", "whisfusion")):
        assert write_manifest(tmp_path / name, [utterance], style) == 1
        assert read_manifest(tmp_path / name) == [utterance]
    nemo = json.loads(lzma.decompress((tmp_path / "nemo.jsonl.xz").read_bytes()))
    assert nemo["audio_filepath"] == "000001.opus"
    assert nemo["lang"] == "fr"
    assert nemo["offset"] == 1.5
    assert {"audio", "language", "start"}.isdisjoint(nemo)
    assert not list(tmp_path.glob(".*"))


def test_written_elsewhere_paths_still_lead_to_the_audio(tmp_path):
    inside = Utterance("1", "clips/1.wav", 1.0, "a", "en", root=tmp_path / "corpus")
    packed = Utterance("2", "2.opus", 1.0, "b", "en", shard="x.tar", root=tmp_path / "corpus")
    for folder in (tmp_path, tmp_path / "other", tmp_path / "corpus"):
        write_manifest(folder / "m.jsonl", [inside, packed])
        again = read_manifest(folder / "m.jsonl")
        assert [u.audio_path for u in again] == [inside.audio_path, packed.audio_path]
    (first, second) = read_manifest(tmp_path / "m.jsonl")
    assert (first.audio, second.shard, second.audio) == ("corpus/clips/1.wav", "corpus/x.tar", "2.opus")


def test_folder_is_all_its_manifests(tmp_path):
    write_lines(tmp_path / "b.jsonl", RECORD | {"id": "b"})
    write_manifest(tmp_path / "c.jsonl.xz", [Utterance(**RECORD | {"id": "c"}, root=tmp_path)])
    (tmp_path / "notes.txt").write_text("not a manifest")
    assert [u.id for u in read_manifest(tmp_path)] == ["b", "c"]
    assert [u.id for u in read_manifest(tmp_path / "c.jsonl.xz", tmp_path / "b.jsonl")] == ["c", "b"]


def test_every_problem_of_every_file_at_once(tmp_path):
    good, bad = RECORD, tmp_path / "bad.jsonl"
    lines = [
        json.dumps(good).encode(),
        b"{not json",
        b'"a string"',
        b"\xff\xfe",
        b"",
        json.dumps({"text": 5, "language": "", "duration": -1, "start": "x", "shard": 3}).encode(),
        json.dumps(good | {"duration": True}).encode(),
        b'{"audio": "a", "text": "b", "language": "en", "duration": NaN}',
        json.dumps(good | {"target_lang": "de"}).encode(),
    ]
    bad.write_bytes(b"\n".join(lines))
    with pytest.raises(ManifestError) as caught:
        read_manifest(bad, tmp_path / "nowhere.jsonl")
    message = str(caught.value)
    assert message.startswith("8 problems")
    assert "line 2: not JSON" in message
    assert "line 3: not a JSON object" in message
    assert "line 4: not UTF-8" in message
    (line6,) = [line for line in message.splitlines() if "line 6:" in line]
    for word in ("`audio`", "`duration`", "`text`", "`language`", "`start`", "`shard`"):
        assert word in line6
    assert "line 7: `duration`" in message
    assert "line 8: `duration`" in message
    assert "line 9: a translation into 'de'" in message
    assert "nowhere.jsonl: no such file or folder" in message
    assert [u.id for u in parse_manifest(bad)[0]] == ["a-1"]


def test_many_problems_are_counted_not_printed(tmp_path):
    (tmp_path / "bad.jsonl").write_text("x\n" * 50)
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path / "bad.jsonl")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("50 problems")
    assert len(lines) == 22
    assert lines[-1].strip() == "... and 30 more"


def test_damaged_and_empty_sources(tmp_path):
    (tmp_path / "cut.jsonl.xz").write_bytes(lzma.compress(b"{}\n" * 1000)[:-20])
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.tar").write_bytes(b"no tar file at all" * 100)
    _, problems = parse_manifest(tmp_path / "cut.jsonl.xz", tmp_path / "empty", tmp_path / "no.tar")
    assert "cannot be read" in problems[-3]
    assert "a folder without" in problems[-2]
    assert "not a plain (uncompressed) tar file" in problems[-1]


def test_byte_order_mark(tmp_path):
    (tmp_path / "m.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(RECORD).encode())
    assert read_manifest(tmp_path / "m.jsonl")[0].id == "a-1"


def test_webdataset(tmp_path):
    label = {"text": "hello", "language": "en", "duration": 0.5, "audio_filepath": "/old/1.wav", "offset": 7.0}
    write_shard(
        tmp_path / "wds-0.tar",
        [
            ("x/one.wav", wav(0.5)),
            ("x/one.json", json.dumps(label).encode()),
            ("two.json", b"{"),
            ("two.wav", wav(0.5)),
            ("three.wav", wav(0.5)),
            ("four.json", json.dumps(label).encode()),
        ],
    )
    (utterance,), problems = parse_manifest(tmp_path)
    assert (utterance.id, utterance.audio, utterance.shard) == ("wds-0/x/one", "x/one.wav", "wds-0.tar")
    assert (utterance.dataset, utterance.start) == ("wds-0", None)
    assert utterance.extra == {"original_audio": "/old/1.wav", "original_start": 7.0}
    assert len(load_samples(utterance)) == 8000
    assert len(problems) == 3
    assert "three.wav has no .json" in problems[0]
    assert "two.json: not JSON" in problems[1]
    assert "four.json: no audio" in problems[2]


def test_reading_is_fast(tmp_path):
    count = 20_000
    line = json.dumps(RECORD) + "\n"
    (tmp_path / "big.jsonl").write_text(line * count)
    start = time.process_time()
    assert len(read_manifest(tmp_path / "big.jsonl")) == count
    assert time.process_time() - start < count / LINES_PER_SECOND


def make_shard(path, count=40):
    """Clips of different lengths, so that a mix-up shows."""
    write_shard(path, [(f"{i:06d}.wav", wav(0.1 + 0.01 * i)) for i in range(count)])
    return [
        Utterance(f"{path.stem}-{i}", f"{i:06d}.wav", 0.1 + 0.01 * i, "a", "en", shard=path.name, root=path.parent)
        for i in range(count)
    ]


def lengths(utterances):
    return [len(load_samples(u)) for u in utterances]


def test_samples_of_a_file_and_of_a_shard_member(tmp_path):
    (tmp_path / "1.wav").write_bytes(wav(0.5))
    write_shard(tmp_path / "s.tar", [("./1.wav", wav(0.5)), ("long/" + "n" * 200 + ".wav", wav(0.25))])
    file = Utterance("1", "1.wav", 0.5, "a", "en", root=tmp_path)
    member = replace(file, shard="s.tar")
    for utterance in (file, member):
        samples = load_samples(utterance)
        assert samples.dtype == np.float32
        np.testing.assert_allclose(samples, tone(0.5), atol=PCM16_STEP)
    assert len(load_samples(replace(member, audio="long/" + "n" * 200 + ".wav"))) == 4000


@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_a_span_of_a_long_file(tmp_path, rate):
    left = np.concatenate([np.zeros(rate), tone(1.0, rate), np.zeros(rate)])
    soundfile.write(tmp_path / "long.flac", np.stack([left, left], axis=1), rate)
    span = Utterance("1", "long.flac", 1.0, "a", "en", start=1.0, root=tmp_path)
    samples = load_samples(span)
    assert len(samples) == 16_000
    # The middle: resampling rings at the borders of the span.
    np.testing.assert_allclose(samples[800:-800], tone(1.0)[800:-800], atol=0.01)
    assert len(load_samples(replace(span, start=2.5))) == 8000
    with pytest.raises(AudioError, match="starts at 3.5 s, but its audio is 3 s long".replace(".", r"\.")):
        load_samples(replace(span, start=3.5))


def test_errors_name_the_utterance(tmp_path):
    make_shard(tmp_path / "s.tar", 1)
    (tmp_path / "text.wav").write_text("no sound")
    clip = Utterance("clip-7", "000000.wav", 0.1, "a", "en", shard="s.tar", root=tmp_path)
    for broken, words in (
        (replace(clip, shard="gone.tar"), "does not exist"),
        (replace(clip, audio="gone.wav"), "has no member gone.wav"),
        (replace(clip, audio="gone.wav", shard=None), "gone.wav"),
        (replace(clip, audio="text.wav", shard=None), "text.wav"),
        (replace(clip, audio="gone.wav", shard=None, start=1.0), "gone.wav"),
    ):
        with pytest.raises(AudioError, match=words) as caught:
            load_samples(broken)
        assert str(caught.value).startswith("clip-7: ")


def test_missing_audio_names_each_missing_thing_once(tmp_path):
    present = make_shard(tmp_path / "s.tar", 3)
    gone = [replace(u, id=f"g{i}", shard="gone.tar") for i, u in enumerate(present)]
    member = replace(present[0], id="m", audio="x.wav")
    file = replace(present[0], id="f", audio="x.wav", shard=None)
    assert missing_audio(present) == []
    problems = missing_audio([*present, *gone, member, file])
    assert len(problems) == 3
    assert "gone.tar does not exist" in problems[0]
    assert problems[1].startswith("m: ")
    assert problems[2].startswith("f: ")


def test_a_cut_off_shard_is_refused(tmp_path):
    make_shard(tmp_path / "s.tar", 3)
    content = (tmp_path / "s.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[: len(content) // 3])
    with pytest.raises(AudioError, match=r"cut\.tar"):
        shard_index(str(tmp_path / "cut.tar"))


def test_threads_share_shards(tmp_path, monkeypatch):
    # More shards than stay open, so that threads also close each other's.
    monkeypatch.setattr(shard_module, "_open_shard", shard_module.lru_cache(maxsize=2)(shard_module._OpenShard))
    utterances = [u for k in range(5) for u in make_shard(tmp_path / f"{k}.tar", 20)]
    order = np.random.default_rng(0).permutation(len(utterances) * 3) % len(utterances)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: len(load_samples(utterances[i])), order))
    assert found == [round(utterances[i].duration * 16_000) for i in order]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_workers_share_shards(tmp_path):
    utterances = make_shard(tmp_path / "s.tar")
    expected = lengths(utterances)  # opens the shard before the fork
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(lengths, [utterances[::-1], utterances] * 3) == [expected[::-1], expected] * 3


def test_utterances_can_be_sent_to_workers():
    utterance = Utterance(**RECORD, extra={"a": 1}, root=Path("/data"))
    assert pickle.loads(pickle.dumps(utterance)) == utterance
    assert hash(utterance) == hash(pickle.loads(pickle.dumps(utterance)))


def test_shards_are_plain_tars_and_the_same_every_time(tmp_path):
    members = [("b.opus", b"22"), ("a.opus", b"1")]
    for name in ("1.tar", "2.tar"):
        assert write_shard(tmp_path / name, members) == 2
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    with tarfile.open(tmp_path / "1.tar") as tar:
        assert tar.getnames() == ["b.opus", "a.opus"]
    assert shard_index(str(tmp_path / "1.tar")).in_file_order() == ["b.opus", "a.opus"]
    assert read_member(str(tmp_path / "1.tar"), "a.opus") == b"1"


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def members():
        yield "a", b"1"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "s.tar", members())
    with pytest.raises(AttributeError):
        write_manifest(tmp_path / "m.jsonl", [Utterance(**RECORD), None])
    assert list(tmp_path.iterdir()) == []


def test_real_speech():
    folder = os.environ.get("WHISFUSION_SPEECH")
    if not folder:
        pytest.skip("WHISFUSION_SPEECH is not set")
    utterances = read_manifest(Path(folder) / "dev")
    assert {u.language for u in utterances} == {"en", "zh"}
    assert missing_audio(utterances) == []
    for utterance in utterances[::100]:
        assert abs(len(load_samples(utterance)) / 16_000 - utterance.duration) < 0.1
