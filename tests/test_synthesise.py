"""Sentences that are spoken by programs: which sentences, which voices, and what is written."""

import lzma
import shutil
import sys
from fractions import Fraction

import numpy as np
import pytest

from whisfusion.cli import main
from whisfusion.data.check import check_data
from whisfusion.data.corpus import CODINGS, encode
from whisfusion.data.engines import ENGINES, Voice, find_voices, resample, speak
from whisfusion.data.manifest import load_samples, read_manifest
from whisfusion.data.sentences import choose_sentences, read_sentences
from whisfusion.data.synthesise import HELD_OUT_FOLDER, SynthesisOptions, synthesise
from whisfusion.errors import AudioError, LanguageError, ManifestError, OptionError

# Of the samples of a tone away from its ends, relative to its peak.
RESAMPLED_TOLERANCE = 1e-3
# Root mean square of a tone whose own is 0.21.
CODED_TOLERANCE = {"flac": 1e-4, "wav": 1e-4, "opus": 0.02}

FAKE = """#!{python} -SE
import struct, sys, wave
words = sys.argv[1:]
text = words[-1].split(">")[2].split("<")[0] if words[-1].startswith("<") else words[-1]
if text.endswith(".wav"):
    text = sys.stdin.read()
if "Fail" in text:
    sys.exit("cannot say that")
if "Mute" not in text:
    with wave.open(next(word for word in words if word.endswith(".wav")), "wb") as out:
        out.setnchannels(1), out.setsampwidth(2), out.setframerate({rate})
        count = int(0.08 * len(text) * {rate})
        out.writeframes(struct.pack(f"<{{count}}h", *(9000 * (i // 40 % 2) for i in range(count))))
"""
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SENTENCES = [f"This is {tens} and {ones} here." for tens in NUMBERS[:4] for ones in NUMBERS]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that write a buzz as long as the text, and nothing else on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, rate in (("pico2wave", 16_000), ("espeak-ng", 22_050), ("open_jtalk", 48_000), ("RHVoice-test", 24_000)):
        (folder / name).write_text(FAKE.format(python=sys.executable, rate=rate))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def options(**fields):
    return SynthesisOptions(**{"language": "en", "engine": "pico", "sentences": 12, "workers": 1} | fields)


@pytest.mark.parametrize("engine", ["pico", "espeak"])
def test_what_is_written_can_be_trained_on(programs, tmp_path, engine):
    seen = []
    report = synthesise(SENTENCES, tmp_path / "out", options(engine=engine), progress=lambda *p: seen.append(p))
    utterances = read_manifest(tmp_path / "out")
    assert utterances == report.utterances
    assert len(utterances) == 12
    for utterance in utterances:
        assert utterance.text in SENTENCES
        assert (utterance.language, utterance.dataset) == ("en", f"synthetic-{engine}-en")
        assert utterance.shard == f"synthetic-{engine}-en-000.tar"
        assert utterance.speaker.startswith(engine)
        assert len(load_samples(utterance)) == pytest.approx(utterance.duration * 16_000, abs=16)
    assert len({u.speaker for u in utterances}) > 4
    assert seen == [(i, 12) for i in range(1, 13)]
    assert check_data([tmp_path / "out"]).ok
    assert "12 clips" in report.render()


def test_the_seed_decides_and_the_number_of_processes_does_not(programs, tmp_path):
    for name, fields in {"one": {}, "two": {"workers": 2}, "other": {"seed": 43}}.items():
        synthesise(SENTENCES, tmp_path / name, options(**fields))

    def content(name):
        return [file.read_bytes() for file in sorted((tmp_path / name).iterdir())]

    assert len(content("one")) == 2
    assert content("one") == content("two")
    assert content("one") != content("other")


def test_held_out_voices_and_sentences_are_nowhere_else(programs, tmp_path):
    made = options(sentences=40, held_out_voices=3, held_out_sentences=8)
    report = synthesise(SENTENCES, tmp_path, made)
    train, held = read_manifest(tmp_path), read_manifest(tmp_path / HELD_OUT_FOLDER)
    assert (len(train), len(held)) == (40, 8)
    assert held == report.held_out
    assert not {u.speaker for u in train} & {u.speaker for u in held}
    assert not {u.text for u in train} & {u.text for u in held}
    assert {u.dataset for u in held} == {"synthetic-pico-en-heldout"}
    assert "8 clips" in report.render()
    with pytest.raises(OptionError, match="40 voices"):
        synthesise(SENTENCES, tmp_path, options(held_out_voices=40))


def test_hours_are_filled_by_other_voices_saying_it_again(programs, tmp_path):
    report = synthesise(SENTENCES[:10], tmp_path, options(sentences=None, hours=0.012))
    seconds = [u.duration for u in report.utterances]
    assert sum(seconds) >= 43.2 > sum(seconds[:-1])
    said = [(u.speaker, u.text) for u in report.utterances]
    assert len(said) > 10
    assert len(set(said)) == len(said)


def test_it_ends_when_every_voice_has_said_everything(programs, tmp_path):
    report = synthesise(SENTENCES[:1], tmp_path, options(language="de", sentences=50))
    assert len(report.utterances) == len(ENGINES["pico"].voices("de"))
    assert "50 clips were asked for" in report.render()


def test_what_fails_is_left_out_and_counted(programs, tmp_path):
    bad = ["Fail to say this, please.", "Mute this one for us.", "Short."]
    report = synthesise([*SENTENCES[:6], *bad], tmp_path, options(sentences=6))
    assert {u.text for u in report.utterances} <= set(SENTENCES)
    report = synthesise([*bad, "It can be said."], tmp_path, options(engine="espeak", language="de", sentences=5))
    reasons = "\n".join(report.failed)
    for reason in ("status 1: cannot say that", "wrote no sound", "which is not between 1 and 28"):
        assert reason in reasons
    assert f"clips that failed: {len(report.failed)}" in report.render()
    with pytest.raises(ManifestError, match=r"no sentence could be spoken(.|\n)*cannot say that"):
        synthesise(bad[:1], tmp_path, options())


def test_a_missing_program_is_named_with_its_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    packages = {"pico": "libttspico-utils", "espeak": "espeak-ng", "jtalk": "open-jtalk", "rhvoice": "rhvoice"}
    for engine, package in packages.items():
        language = ENGINES[engine].languages[0]
        with pytest.raises(OptionError, match=f"not on PATH: install the package {package}"):
            synthesise(SENTENCES, tmp_path, options(engine=engine, language=language))
    with pytest.raises(LanguageError, match="espeak-ng does not speak 'ja'; jtalk can"):
        find_voices(ENGINES["espeak"], "ja")
    with pytest.raises(LanguageError, match="pico2wave does not speak 'pl'; espeak and rhvoice can"):
        find_voices(ENGINES["pico"], "pl")


def test_japanese_takes_its_text_from_standard_input_and_its_voices_from_a_folder(programs, tmp_path, monkeypatch):
    monkeypatch.setenv("OPEN_JTALK_VOICES", str(tmp_path / "voices"))
    with pytest.raises(OptionError, match="open_jtalk has no voice: install the package open-jtalk"):
        synthesise(["今日はとてもいい天気ですね。"], tmp_path, options(language="ja", engine="jtalk"))
    (tmp_path / "voices/mei").mkdir(parents=True)
    (tmp_path / "voices/mei/mei.htsvoice").touch()
    report = synthesise(["今日はとてもいい天気ですね。"], tmp_path, options(language="ja", engine="jtalk", sentences=3))
    assert len(report.utterances) == 3
    for utterance in report.utterances:
        assert utterance.speaker.startswith("jtalk-mei-p")
        assert 0.8 < utterance.duration / (0.08 * len(utterance.text)) < 1.25


def test_rhvoice_speaks_with_the_voices_that_are_there_and_free(programs, tmp_path, monkeypatch):
    monkeypatch.setenv("RHVOICE_VOICES", str(tmp_path / "voices"))
    made = options(language="pl", engine="rhvoice", sentences=20, held_out_voices=2, held_out_sentences=4)
    with pytest.raises(OptionError, match="RHVoice-test has no voice: install the package rhvoice"):
        synthesise(["Dzisiaj jest ładna pogoda."], tmp_path, made)
    for name in ("cezary", "magda", "natan", "alicja", "michal", "Leticia-F123"):
        (tmp_path / "voices" / name).mkdir(parents=True)
    voices = ENGINES["rhvoice"].voices("pl")
    assert {voice.accent for voice in voices} == {"alicja", "michal"}
    assert len({voice.name for voice in voices}) == len(voices) == 18
    assert {voice.accent for voice in ENGINES["rhvoice"].voices("pt")} == {"leticia-f123"}
    assert ENGINES["rhvoice"].voices("es") == []
    words = ["raz", "dwa", "trzy", "cztery", "pięć"]
    report = synthesise([f"To jest {a} albo {b} dla nas." for a in words for b in words], tmp_path, made)
    assert (len(report.utterances), len(report.held_out)) == (20, 4)
    assert not {u.speaker for u in report.utterances} & {u.speaker for u in report.held_out}
    for utterance in report.utterances:
        assert utterance.speaker.startswith(("rhvoice-alicja-p", "rhvoice-michal-p"))


def test_rhvoice_is_told_rate_and_pitch_in_percent(tmp_path):
    voice = Voice("small", "natan", pitch=1.12, size=1.07)
    command = ENGINES["rhvoice"].command("Tak.", voice, 0.8, tmp_path / "spoken.wav")
    told = ["-q", "max", "-p", "natan", "-r", "80", "-t", "112", "-o", str(tmp_path / "spoken.wav")]
    assert command == ["RHVoice-test", *told]


def test_bad_options():
    with pytest.raises(OptionError) as caught:
        options(hours=1.0, sentences=0, engine="say", coding="mp3", held_out_voices=-1, seed=-1)
    for word in ("either", "`sentences`", "`engine`", "`coding`", "`held_out_voices`", "`seed`"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("language", "sentence", "reason"),
    [
        ("en", "There were 12 of them.", "digits"),
        ("zh", "他有３个。", "digits"),
        ("en", "Profit & loss", "symbols or letters of another language"),
        ("en", "<speed>", "symbols or letters of another language"),
        ("it", "La Straße è lunga.", "symbols or letters of another language"),
        ("zh", "他说 hello", "symbols or letters of another language"),
        ("ja", "首都は Paris", "symbols or letters of another language"),
        ("de", "Die NATO tagt.", "words in capitals"),
        ("fr", "Le siècle XIV", "words in capitals"),
        ("pl", "...!", "no words"),
        ("en", "word " * 60, "longer than 28 s"),
        ("zh", "好" * 80, "longer than 28 s"),
    ],
)
def test_sentences_that_would_be_read_differently_are_left_out(language, sentence, reason):
    assert choose_sentences([sentence], language) == ([], {reason: 1})


def test_sentences_are_tidied_and_said_once():
    given = ["- Czekaj na „mnie”!", "czekaj, na mnie", "Żółć i jaźń?", "To już było."]
    kept, dropped = choose_sentences(given, "pl", without={"to już było"})
    assert kept == ["Czekaj na mnie!", "Żółć i jaźń?"]
    assert dropped == {"said before": 1, "shared with an evaluation set": 1}
    for language, sentence in {"zh": "他二十四岁。", "ko": "안녕하세요?", "ja": "これはペンです。"}.items():
        assert choose_sentences([sentence], language)[0] == [sentence]


def test_texts_are_read_packed_or_plain_and_missing_ones_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("eins\n\n zwei \n", encoding="utf-8")
    with lzma.open(tmp_path / "b.txt.xz", "wt", encoding="utf-8") as out:
        out.write("drei\n")
    assert read_sentences([tmp_path / "a.txt", tmp_path / "b.txt.xz"]) == ["eins", "zwei", "drei"]
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(ManifestError, match=r"(?s)c\.txt.*gone\.txt"):
        read_sentences([tmp_path / "c.txt", tmp_path / "gone.txt"])


@pytest.mark.parametrize("ratio", [Fraction(16_000, 22_050), Fraction(100, 107), Fraction(100, 86)])
def test_resampling_keeps_a_tone(ratio):
    time = np.arange(22_050)
    tone = 0.5 * np.sin(0.2 * time).astype(np.float32)
    changed = resample(tone, ratio)
    assert len(changed) == round(len(tone) * ratio)
    expected = 0.5 * np.sin(0.2 * np.arange(len(changed)) / float(ratio))
    middle = slice(2_000, -2_000)
    assert np.abs(changed - expected)[middle].max() < 0.5 * RESAMPLED_TOLERANCE
    assert changed.dtype == np.float32


@pytest.mark.parametrize("coding", CODINGS)
def test_codings_keep_the_samples(coding):
    from whisfusion.audio import load_audio

    tone = (0.3 * np.sin(np.arange(24_000) / 6)).astype(np.float32)
    heard = load_audio(encode(tone, coding))
    assert len(heard) == len(tone)
    error = (heard - tone)[1600:-1600]
    assert np.sqrt((error**2).mean()) < CODED_TOLERANCE[coding]


def test_the_command(programs, tmp_path, capfd):
    (tmp_path / "en.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    command = ["data", "synthesise", str(tmp_path / "en.txt"), "--language", "English", "--engine", "espeak"]
    assert main([*command, "--sentences", "5", "--workers", "1", "--out", str(tmp_path / "a")]) == 0
    assert "synthetic-espeak-en.jsonl: 5 clips" in capfd.readouterr().out
    # All sentences but five are now in an "evaluation set".
    assert main([*command, "--sentences", "35", "--workers", "1", "--out", str(tmp_path / "b")]) == 0
    against = ["--against", str(tmp_path / "b")]
    assert main([*command, *against, "--sentences", "5", "--workers", "1", "--out", str(tmp_path / "c")]) == 0
    assert not {u.text for u in read_manifest(tmp_path / "b")} & {u.text for u in read_manifest(tmp_path / "c")}
    assert main([*command, "--workers", "1", "--out", str(tmp_path / "d")]) == 2
    assert "give either `hours` or `sentences`" in capfd.readouterr().err


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_every_voice_of_espeak_speaks():
    engine = ENGINES["espeak"]
    texts = {"zh": "今天天气很好。", "ko": "오늘은 날씨가 좋다."}
    for language in engine.languages:
        for voice in engine.voices(language)[:: 1 if language == "de" else 17]:
            samples = speak(engine, texts.get(language, "La casa est magna et alta."), voice, 1.0)
            assert 1 < len(samples) / 16_000 < 10, voice
            assert np.abs(samples).max() > 0.05, voice
    with pytest.raises(AudioError):
        speak(engine, "Hello.", type(voice)("none", "xx-none"), 1.0)


@pytest.mark.skipif(not ENGINES["rhvoice"].voices("pl"), reason="RHVoice has no Polish voice")
@pytest.mark.skipif(shutil.which("RHVoice-test") is None, reason="RHVoice is not installed")
def test_rhvoice_keeps_the_tempo_whatever_the_size_and_the_pitch():
    engine = ENGINES["rhvoice"]
    seconds = [len(speak(engine, "Dzisiaj jest ładna pogoda.", v, 1.0)) / 16_000 for v in engine.voices("pl")[:9]]
    assert max(seconds) < 1.1 * min(seconds)
    slow, fast = (len(speak(engine, "Dzisiaj jest ładna pogoda.", engine.voices("pl")[0], t)) for t in (0.8, 1.25))
    assert 1.3 < slow / fast < 1.8


@pytest.mark.parametrize("coding", CODINGS)
def test_the_same_clip_gives_the_same_bytes(coding):
    samples = np.random.default_rng(5).uniform(-0.5, 0.5, 8_000)
    assert encode(samples, coding) == encode(samples, coding)
