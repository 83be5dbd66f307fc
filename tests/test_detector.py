"""What tells the language: Whisper's own answers, cut down, kept in a model folder, and asked by both engines."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_ENCODER, hum
from small_run import CLIPS
from torch import Tensor

import whisfusion
from whisfusion import checkpoint
from whisfusion.cli import main
from whisfusion.data.manifest import load_samples, read_manifest
from whisfusion.detector import DetectorConfig, LanguageDetector, places
from whisfusion.engine import GraphEngine
from whisfusion.errors import ModelError, OptionError
from whisfusion.systems import DiffusionSystem
from whisfusion.tokenizer import LANGUAGES
from whisfusion.train.detector import Teaching, encoder_of, odd, taught_detector, whole_detector
from whisfusion.transcriber import Transcriber
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig, detect_language

OLD_VOCABULARY, NEW_VOCABULARY = 51_865, 51_866
OWN = ("en", "de", "ja")
QUICK = {"candidates": 1, "steps": 1, "repair": False}


def random_decoder(vocab_size: int = OLD_VOCABULARY) -> WhisperDecoder:
    torch.manual_seed(3)
    decoder = WhisperDecoder(WhisperDecoderConfig(vocab_size, width=64, layers=3, heads=2, positions=8))
    for parameter in decoder.parameters():
        parameter.normal_(0, 0.2)
    return decoder


def heard(*lengths: int) -> tuple[Tensor, Tensor]:
    audio_BTD = torch.randn(len(lengths), max(lengths), 64, generator=torch.Generator().manual_seed(1))
    return audio_BTD, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("vocab_size", [OLD_VOCABULARY, NEW_VOCABULARY])
def test_the_whole_detector_gives_whispers_own_answers(vocab_size: int):
    decoder = random_decoder(vocab_size)
    audio_BTD, heard_BT = heard(20, 7, 13)
    logits_BX = whole_detector(decoder)(audio_BTD, heard_BT)
    for row, expected in enumerate(detect_language(decoder, audio_BTD, audio_mask_BT=heard_BT)):
        chances = dict(zip(LANGUAGES, logits_BX[row].softmax(-1).tolist(), strict=True))
        assert {language: chances[language] for language in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
        # Cantonese came with large-v3.
        assert ("yue" in expected) == (vocab_size == NEW_VOCABULARY)
        assert chances["yue"] > 0 or "yue" not in expected


def test_a_clip_alone_and_in_a_batch_get_the_same_logits():
    detector = whole_detector(random_decoder())
    audio_BTD, heard_BT = heard(20, 7)
    torch.testing.assert_close(detector(audio_BTD, heard_BT)[1:], detector(audio_BTD[1:, :7]), rtol=1e-4, atol=1e-4)


def test_a_shape_that_makes_no_sense_is_refused():
    with pytest.raises(OptionError, match="detector layers must be at least 1"):
        DetectorConfig(layers=0)
    with pytest.raises(OptionError, match="not a multiple of 8 heads"):
        DetectorConfig(width=500)


def test_odd_speech_is_speech_of_some_seconds():
    rng = np.random.default_rng(0)
    made = [odd(hum(6.0, seed), hum(4.0, seed + 1), rng) for seed in range(20)]
    assert all(clip.dtype == np.float32 and np.isfinite(clip).all() for clip in made)
    assert {len(clip) for clip in made} > {3 * 16_000, 5 * 16_000}
    assert 1.0 < min(map(len, made)) / 16_000 < max(map(len, made)) / 16_000 <= 12


@pytest.fixture(scope="module")
def folder(tiny_clip_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a detector that has opinions, none of them the decoder's."""
    folder = shutil.copytree(tiny_clip_model, tmp_path_factory.mktemp("detector") / "model")
    torch.manual_seed(5)
    detector = LanguageDetector(DetectorConfig(layers=2, hidden=16, width=64, heads=2)).requires_grad_(False)
    for parameter in detector.parameters():
        parameter.normal_(0, 0.3)
    detector.head.weight *= 10
    checkpoint.add(folder, detector=detector)
    return folder


def test_it_is_kept_in_the_model_folder(folder: Path, tmp_path: Path):
    model = checkpoint.load(folder, dtype=torch.float32)
    assert model.detector is not None
    assert model.config.detector == model.detector.config
    assert model.config.tells_language
    out = tmp_path / "exported"
    assert main(["export", str(folder), "--out", str(out), "--int8", "--encoder"]) == 0
    again = checkpoint.load(out, dtype=torch.float32)
    assert again.detector is not None
    for name, value in model.detector.state_dict().items():
        torch.testing.assert_close(again.detector.state_dict()[name], value)
    # A model that is saved anew has none until it is given one.
    checkpoint.save(out, again.config, again.decoder.state_dict(), encoder=again.encoder.state_dict())
    assert checkpoint.read_config(out)[0].detector is None
    assert not (out / "detector.safetensors").exists()


def test_one_that_was_altered_is_refused(folder: Path, tmp_path: Path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    with (broken / "detector.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="sha256 differs"):
        checkpoint.load(broken, dtype=torch.float32)


def test_a_detector_of_another_width_does_not_fit(folder: Path):
    config, _ = checkpoint.read_config(folder)
    with pytest.raises(OptionError, match="detector width 512 is not the encoder's width 64"):
        dataclasses.replace(config, detector=DetectorConfig())


def test_the_model_asks_it_alone_and_in_batches_with_both_engines(folder: Path):
    model = checkpoint.load(folder, dtype=torch.float32)
    assert model.detector is not None
    clips = [hum(seconds, seed) for seed, seconds in enumerate([1.0, 2.5, 1.7, 4.0, 3.1, 2.0])]
    clips.append(np.concatenate([hum(20.0, 7), hum(20.0, 8)]))
    encode = encoder_of(model)
    expected = []
    for clip in clips:
        # A long file is of the language of its first window.
        first = clip if len(clip) <= 30 * 16_000 else clip[: whisfusion.speech.windows(clip)[0][1]]
        logits_X = model.detector(encode(first)[None])[0, places(OWN)]
        expected.append(OWN[int(logits_X.argmax())])
    assert len(set(expected)) > 1
    plain = Transcriber(DiffusionSystem(model))
    engine = Transcriber(DiffusionSystem(model, GraphEngine(model, capture=False)))
    for transcriber in (plain, engine):
        assert [transcript.language for transcript in transcriber.transcribe(clips, **QUICK)] == expected
        assert [transcriber.transcribe(clip, **QUICK).language for clip in clips] == expected
    assert plain.transcribe(clips[0], language="ja").language == "ja"


def test_a_model_that_was_not_trained_to_can_be_given_one(tiny_model: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    with pytest.raises(whisfusion.errors.LanguageError):
        whisfusion.load(folder, device="cpu").transcribe(hum(1.0))
    torch.manual_seed(0)
    checkpoint.add(folder, detector=LanguageDetector(DetectorConfig(1, 8, 64, 1)).requires_grad_(False))
    assert whisfusion.load(folder, device="cpu").transcribe(hum(1.0)).language in whisfusion.tokenizer.PAPER_LANGUAGES


def spectrum(samples: np.ndarray) -> Tensor:
    """Features of which more can be told than of an untrained encoder's."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, 640)[::320]
    power = np.log10(np.abs(np.fft.rfft(frames * np.hanning(640)))[:, 1:257].reshape(-1, 64, 4).mean(2) + 1e-3)
    return torch.from_numpy(power - power.mean()).float()


def test_it_is_taught_to_answer_as_before(tmp_path: Path):
    whole = whole_detector(random_decoder())
    utterances, shape = read_manifest(CLIPS), DetectorConfig(2, 16, 64, 2)
    with (tmp_path / "features").open("w+b") as file:
        teaching = Teaching(clips=300, passes=10, learning_rate=2e-3)
        taught = taught_detector(whole, shape, utterances, spectrum, file, languages=OWN, teaching=teaching)
    assert taught.detector.config == shape
    assert taught.kept_out == 15
    assert taught.agreed > 0.8
    rng, own = np.random.default_rng(9), places(OWN)
    # Of speech that it has not heard so.
    clips = [odd(load_samples(utterances[i]), load_samples(utterances[i - 1]), rng) for i in range(len(utterances))]
    said_BX, wanted_BX = (
        torch.cat([tell(spectrum(clip)[None]) for clip in clips]) for tell in (taught.detector, whole)
    )
    assert said_BX[:, places(["yue"])].max() < -1000
    said_BX, wanted_BX = (x_BX[:, own] - x_BX[:, own].mean(1, keepdim=True) for x_BX in (said_BX, wanted_BX))
    assert (said_BX - wanted_BX).square().mean() < 0.3 * (wanted_BX - wanted_BX.mean(0)).square().mean()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"clips": 0}, "clips must be more than 0"), ({"odd": 1.5}, "odd must be between 0 and 1")],
)
def test_teaching_that_makes_no_sense_is_refused(wrong: dict[str, float], said: str):
    with pytest.raises(OptionError, match=said):
        Teaching(**wrong)


def test_the_command_puts_one_in(tiny_clip_model: Path, tiny_whisper: Path, tmp_path: Path, capsys):
    folder = shutil.copytree(tiny_clip_model, tmp_path / "model")
    config = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config.replace('"whisper-base"', f'"{tiny_whisper}"'), encoding="utf-8")
    assert main(["detector", str(folder), "--device", "cpu"]) == 0
    assert "a detector of" in capsys.readouterr().out
    whole = checkpoint.read_config(folder)[0].detector
    assert whole == DetectorConfig(1, 256, TINY_ENCODER.width, TINY_ENCODER.heads)
    options = ["--layers", "1", "--hidden", "8", "--clips", "30", "--passes", "1", "--device", "cpu"]
    assert main(["detector", str(folder), "--data", str(CLIPS), *options]) == 0
    assert "says what Whisper says in" in capsys.readouterr().out
    assert checkpoint.load(folder, dtype=torch.float32).config.detector == dataclasses.replace(whole, hidden=8)
    assert main(["info", str(folder)]) == 0
    assert "detector hidden" in capsys.readouterr().out
