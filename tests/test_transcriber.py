import dataclasses
import io
import json

import numpy as np
import pytest
import soundfile
import torch
from conftest import hum

import whisfusion
from whisfusion import checkpoint
from whisfusion.errors import AudioError, LanguageError, OptionError
from whisfusion.tokenizer import ENDOFTEXT
from whisfusion.transcriber import Transcriber

LENGTHS = [1.0, 2.2, 0.4, 3.7, 1.6, 5.0, 0.9, 2.8]


def load_with_opinions(folder) -> Transcriber:
    """An untrained model that is about as sure of its tokens as a trained one."""
    transcriber = whisfusion.load(folder, device="cpu")
    transcriber.system.model.decoder.norm.weight.mul_(30)
    return transcriber


@pytest.fixture(scope="module", params=["tiny_model", "tiny_clip_model"])
def model(request) -> Transcriber:
    return load_with_opinions(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def clip_model(tiny_clip_model) -> Transcriber:
    return load_with_opinions(tiny_clip_model)


@pytest.mark.parametrize("size", [3, 8, 32])
def test_a_clip_alone_and_in_a_batch_gives_the_same_transcript(model, size):
    clips = [hum(LENGTHS[i % 8] + 0.01 * i, seed=i) for i in range(size)]
    together = model.transcribe(clips, language="en", steps=3, batch_size=size)
    for index in {0, 1, size // 2, size - 1}:
        alone = model.transcribe(clips[index], language="en", steps=3)
        assert alone.text == together[index].text
        assert alone.tokens == together[index].tokens
        assert [c.text for c in alone.segments[0].candidates] == [
            c.text for c in together[index].segments[0].candidates
        ]
    assert len({transcript.text for transcript in together}) > size // 2


def test_the_seed_decides(model):
    clip = hum(2.0)
    first, again, other = (
        model.transcribe(clip, language="en", temperature=1.0, seed=seed).segments[0].candidates for seed in (0, 0, 1)
    )
    assert first == again
    assert [c.text for c in first] != [c.text for c in other]


def test_every_kind_of_audio_gives_the_same(clip_model, tmp_path):
    samples = hum(1.5)
    path = tmp_path / "a.wav"
    soundfile.write(path, samples, 16_000, subtype="FLOAT")
    sources = [path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes()), samples, torch.from_numpy(samples)]
    texts = [transcript.text for transcript in clip_model.transcribe(sources, language="en", temperature=1.0)]
    assert len(set(texts)) == 1


def test_results_hold_what_was_decided(model):
    transcript = model.transcribe(hum(2.0), language="English", candidates=4, steps=2, temperature=1.0)
    (segment,) = transcript.segments
    assert transcript.language == "en"
    assert transcript.duration == segment.end == 2.0
    assert len(segment.candidates) == 4
    best = max(segment.candidates, key=lambda c: (c.score, c.confidence))
    assert transcript.text == segment.text == best.text
    assert transcript.confidence == pytest.approx(best.confidence)
    assert all(c.score == -c.risk for c in segment.candidates)
    assert 0 <= (segment.agreement or 0) <= 1
    assert set(transcript.timings) == {"mel", "encode", "decode", "select"}
    as_json = json.loads(json.dumps(transcript.to_dict()))
    assert {"text", "language", "segments", "duration", "confidence"} <= set(as_json)
    assert {"id", "start", "end", "text", "tokens", "avg_logprob", "no_speech_prob", "candidates", "agreement"} <= set(
        as_json["segments"][0]
    )


def test_a_trace_shows_every_step(model):
    transcript = model.transcribe(hum(1.0), language="en", candidates=2, steps=3, trace=True)
    (segment,) = transcript.segments
    assert len(segment.trace) == 3
    assert all(all(row) for row in segment.trace[0].masked)
    assert not all(all(row) for row in segment.trace[2].masked)
    texts = [whisfusion.tokenizer.get_tokenizer().decode(row) for row in segment.trace[-1].tokens]
    assert texts == [candidate.text for candidate in segment.candidates]
    assert len(transcript.to_dict()["segments"][0]["trace"]) == 3
    assert "trace" not in model.transcribe(hum(1.0), language="en").to_dict()["segments"][0]


def test_long_audio_is_cut_decoded_and_joined(clip_model):
    samples = np.concatenate([hum(20.0), np.zeros(16_000, np.float32), hum(19.0, 1), hum(20.0, 2)])
    seen = []
    transcript = clip_model.transcribe(samples, language="en", temperature=1.0, on_progress=seen.append)
    assert [segment.id for segment in transcript.segments] == list(range(len(transcript.segments)))
    assert transcript.segments[0].start == 0
    assert transcript.segments[-1].end == transcript.duration == 60.0
    for before, after in zip(transcript.segments, transcript.segments[1:], strict=False):
        assert before.end == after.start
    assert transcript.text == " ".join(segment.text for segment in transcript.segments if segment.text)
    assert seen[-1] == pytest.approx(60.0)
    first = transcript.segments[0]
    alone = clip_model.transcribe(samples[: round(first.end * 16_000)], language="en", temperature=1.0)
    assert alone.text == first.text


def test_digital_silence_needs_no_model(clip_model, monkeypatch):
    silence, seen, shown = np.zeros(32_000, np.float32), [], []
    start = clip_model.system.start
    monkeypatch.setattr(clip_model.system, "start", lambda batch, *rest: shown.extend(batch) or start(batch, *rest))
    clips = [hum(1.0), silence, hum(2.0, 1)]
    transcripts = clip_model.transcribe(clips, language="en", on_progress=seen.append)
    assert sorted(len(window.samples) for window in shown) == [16_000, 32_000]
    assert all(window.samples.any() for window in shown)
    assert [bool(transcript.text) for transcript in transcripts] == [True, False, True]
    assert seen[-1] == pytest.approx(5.0)
    (segment,) = transcripts[1].segments
    assert (segment.tokens, segment.no_speech_prob, segment.candidates) == ((), 1.0, ())
    assert transcripts[1].language == "en"
    # Whoever gives no language is told one, by the model.
    assert clip_model.transcribe(silence).language in ("en", "de", "ja")
    assert not shown[-1].samples.any()


def test_the_model_detects_the_language_where_it_can(clip_model, tiny_model):
    transcript = clip_model.transcribe(hum(1.0))
    assert transcript.language in ("en", "de", "ja")
    clips = [hum(1.0), hum(3.0, 1), np.concatenate([hum(20.0, 2), hum(20.0, 3)])]
    languages = [t.language for t in clip_model.transcribe(clips)]
    assert languages == [clip_model.transcribe(clip).language for clip in clips]
    with pytest.raises(LanguageError, match="--language"):
        whisfusion.load(tiny_model, device="cpu").transcribe(hum(1.0))


def test_one_language_for_each(clip_model):
    clips = [hum(1.0), hum(1.2, 1), hum(1.0)]
    transcripts = clip_model.transcribe(clips, language=["en", "German", None])
    assert [t.language for t in transcripts][:2] == ["en", "de"]
    assert transcripts[1].text == clip_model.transcribe(clips[1], language="de").text
    with pytest.raises(OptionError, match="one language or as many"):
        clip_model.transcribe(clips, language=["en"])


def test_arrays_of_another_rate(clip_model):
    fast = np.repeat(hum(1.0), 2)
    assert clip_model.transcribe(fast, language="en", sample_rate=32_000).duration == 1.0
    assert clip_model.transcribe(fast, language="en").duration == 2.0


def test_a_transcript_that_fills_its_canvas_says_so(clip_model):
    found = set()
    for seed in range(6):
        (segment,) = clip_model.transcribe(hum(0.5, seed), language="en", candidates=1, trace=True).segments
        assert segment.complete == (ENDOFTEXT in segment.trace[-1].tokens[0])
        found.add(segment.complete)
    assert False in found  # an untrained model seldom stops


def test_selection_by_name(model):
    clip = hum(1.0)
    sure = model.transcribe(clip, language="en", selection="confidence", temperature=1.0).segments[0]
    assert sure.avg_logprob == max(c.confidence for c in sure.candidates)
    target = sure.candidates[1].text
    oracle = model.transcribe(clip, language="en", selection="oracle", reference=target, temperature=1.0)
    assert max(c.score for c in oracle.segments[0].candidates) == 0.0
    with pytest.raises(OptionError, match="reference"):
        model.transcribe(clip, language="en", selection="oracle")
    with pytest.raises(OptionError, match="selection must be"):
        model.transcribe(clip, language="en", selection="best")


@pytest.fixture
def nothing_is_downloaded(monkeypatch, tmp_path):
    monkeypatch.setenv("WHISFUSION_CACHE", str(tmp_path))
    monkeypatch.setenv("WHISFUSION_OFFLINE", "1")


@pytest.mark.usefixtures("nothing_is_downloaded")
def test_proofreading_is_the_default_where_whispers_decoder_is_there(tiny_whole_model, clip_model):
    model, options = load_with_opinions(tiny_whole_model), {"language": "en", "temperature": 0.5}
    read, drawn = ([model.transcribe(hum(2.0, i), **options, proofread=p) for i in range(3)] for p in (True, False))
    # What was drawn is the same, and is told beside what became of it.
    assert [t.segments[0].candidates for t in read] == [t.segments[0].candidates for t in drawn]
    assert all(t.text in [candidate.text for candidate in t.segments[0].candidates] for t in drawn)
    assert [t.text for t in read] != [t.text for t in drawn]
    assert [model.transcribe(hum(2.0, i), **options).text for i in range(3)] == [t.text for t in read]
    assert all("proofread" in t.timings for t in read)
    assert not any("proofread" in t.timings for t in drawn)
    oracle = model.transcribe(hum(2.0), **options, selection="oracle", reference="anything")
    assert oracle.text in [candidate.text for candidate in oracle.segments[0].candidates]
    # Where it is not, nothing is.
    assert "proofread" not in clip_model.transcribe(hum(2.0), **options).timings


@pytest.mark.usefixtures("nothing_is_downloaded")
def test_proofreading_without_whispers_weights_names_the_command(model):
    with pytest.raises(whisfusion.WhisfusionError, match="whisfusion pull whisper-base"):
        model.transcribe(hum(1.0), language="en", proofread=True)


def test_proofreading_takes_whispers_weights_from_the_cache(tiny_model, tiny_whisper, monkeypatch):
    model, asked = load_with_opinions(tiny_model), []
    monkeypatch.setattr("whisfusion.weights.hub.resolve", lambda name: asked.append(name) or tiny_whisper)
    for _ in range(2):
        transcript = model.transcribe(hum(1.0), language="en", proofread=True)
        assert "proofread" in transcript.timings
    assert asked == ["whisper-base"]


def test_spelling_needs_an_adapter(tiny_model, clip_model):
    (segment,) = clip_model.transcribe(hum(1.0), language="en", selection="spelling", temperature=1.0).segments
    assert segment.text == max(segment.candidates, key=lambda c: (c.score, c.confidence)).text
    with pytest.raises(OptionError, match="adapter"):
        whisfusion.load(tiny_model, device="cpu").transcribe(hum(1.0), language="en", selection="spelling")


@pytest.mark.usefixtures("nothing_is_downloaded")
def test_rerank_takes_the_models_own_whisper(tiny_whole_model):
    model = load_with_opinions(tiny_whole_model)
    (segment,) = model.transcribe(
        hum(1.0), language="en", selection="rerank", temperature=1.0, proofread=False
    ).segments
    scores = [candidate.score for candidate in segment.candidates]
    assert len(set(scores)) > 1
    # Of a character that was cut in two nothing is shown.
    assert segment.text == segment.candidates[scores.index(max(scores))].text.replace("\ufffd", "")


@pytest.mark.usefixtures("nothing_is_downloaded")
def test_rerank_without_whispers_weights_names_the_command(model):
    with pytest.raises(whisfusion.WhisfusionError, match="whisfusion pull whisper-base"):
        model.transcribe(hum(1.0), language="en", selection="rerank")


def test_whispers_own_decoder_is_the_other_system(tiny_whisper):
    whisper = whisfusion.load(tiny_whisper, device="cpu", system="whisper")
    clips = [hum(1.0), hum(2.0, 1), hum(31.0, 2)]
    together = whisper.transcribe(clips, language="de")
    assert [t.language for t in together] == ["de"] * 3
    assert [len(t.segments) for t in together] == [1, 1, 2]
    assert together[1].text == whisper.transcribe(clips[1], language="de").text
    assert "candidates" not in together[0].to_dict()["segments"][0]
    assert whisper.transcribe(clips[0]).language in whisfusion.tokenizer.LANGUAGES


def test_bad_requests_say_what_to_do(model):
    clip = hum(1.0)
    with pytest.raises(LanguageError, match="klingon"):
        model.transcribe(clip, language="klingon")
    with pytest.raises(LanguageError, match="not trained on"):
        model.transcribe(clip, language="yo")
    with pytest.raises(OptionError, match="candidates"):
        model.transcribe(clip, language="en", candidates=0)
    with pytest.raises(OptionError, match="ratios"):
        model.transcribe(clip, language="en", steps=3, trajectory=[1.0, 0.5])
    with pytest.raises(OptionError, match="batch_size"):
        model.transcribe(clip, language="en", batch_size=0)
    with pytest.raises(AudioError, match="no samples"):
        model.transcribe(np.zeros(0, np.float32), language="en")
    with pytest.raises(AudioError, match="NaN"):
        model.transcribe(np.full(16_000, np.nan, np.float32), language="en")
    with pytest.raises(OptionError, match="as many references"):
        model.transcribe([clip, clip], language="en", reference=["a"])


def test_a_trajectory_alone_sets_the_number_of_steps(clip_model):
    transcript = clip_model.transcribe(hum(1.0), language="en", trajectory=[1.0, 0.6, 0.3, 0.1])
    assert transcript.segments[0].candidates
    assert dataclasses.is_dataclass(transcript)


def test_unknown_devices_and_dtypes_are_refused(tiny_model):
    with pytest.raises(OptionError, match="device"):
        whisfusion.load(tiny_model, device="tpu9")
    with pytest.raises(OptionError, match="dtype"):
        whisfusion.load(tiny_model, device="cpu", dtype="int4")
    with pytest.raises(OptionError, match="system"):
        whisfusion.load(tiny_model, device="cpu", system="kaldi")  # ty: ignore


@pytest.mark.parametrize(
    ("device", "engine", "graphs"),
    [("cuda", "auto", True), ("cuda", "graph", True), ("cuda", "eager", False), ("cpu", "auto", False)],
)
def test_graphs_are_the_default_on_a_gpu(tiny_model, monkeypatch, device, engine, graphs):
    model, made = checkpoint.load(tiny_model, dtype=torch.float32), []
    monkeypatch.setattr("whisfusion.loading.resolve_device", lambda _: torch.device(device))
    monkeypatch.setattr("whisfusion.loading.checkpoint.load", lambda *_, **__: model)
    monkeypatch.setattr("whisfusion.loading.GraphEngine", made.append)
    whisfusion.load(tiny_model, dtype="float32", engine=engine)
    assert made == [model] * graphs


def test_words_lie_within_their_window():
    """CTC hears on in the silence after a window: the next one's first word must not begin before."""
    from whisfusion.transcript import Heard, join
    from whisfusion.words import Word

    first = Heard("en", "a b", (), 0.0, 0.0, words=(Word(" a", 1.9, 2.14, 0.9), Word(" b", 2.1, 2.2, 0.9)))
    second = Heard("en", "c", (), 0.0, 0.0, words=(Word(" c", 0.0, 0.1, 0.9),))
    joined = join([(0, 32_000), (32_000, 64_000)], [first, second], [{}, {}])
    times = [(word.start, word.end) for segment in joined.segments for word in segment.words]
    assert times == [(1.9, 2.0), (2.0, 2.0), (2.0, 2.1)]
