import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import soundfile
import torch

from whisfusion import checkpoint
from whisfusion.decoder import Canvas, DecoderConfig, DiffusionDecoder
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.pdd import PDDOptions
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig

ROOT = Path(__file__).parent.parent
RATE = 16_000
TINY_ENCODER = EncoderConfig(mels=80, width=64, layers=1, heads=1)


def load_benchmark(name: str) -> ModuleType:
    """A script of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_random_model(folder: Path, config: checkpoint.ModelConfig) -> Path:
    """A model folder of this shape, with the encoder in it; the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        decoder, encoder = DiffusionDecoder(config.decoder), WhisperEncoder(config.encoder)
        # Surer than chance would have it: among thousands of like tokens, draws would hang on the last bit of a sum.
        torch.nn.init.constant_(decoder.norm.get_parameter("weight"), 4.0)
        if config.decoder.drafts:
            torch.nn.init.normal_(decoder.draft.weight, std=0.5)
        if config.decoder.spells_every:
            torch.nn.init.normal_(decoder.adapter.told.weight, std=0.5)
    return checkpoint.save(
        folder,
        config,
        decoder.state_dict(),
        encoder=encoder.state_dict(),
        generation=PDDOptions(candidates=3, steps=2),
        dtype=torch.float32,
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as the paper has it, but tiny and untrained: padded window, fixed canvas, language to be given."""
    decoder = DecoderConfig(layers=1, width=64, heads=2, hidden=96, audio_width=64, canvas=Canvas("fixed", 24))
    config = checkpoint.ModelConfig(decoder=decoder, encoder=TINY_ENCODER, encoder_name="whisper-base")
    return save_random_model(tmp_path_factory.mktemp("tiny") / "tiny-paper", config)


@pytest.fixture(scope="session")
def tiny_clip_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained model with all that is ours: Whisper's blocks, anchors, canvas and window of the clip's size."""
    decoder = DecoderConfig(
        layers=1,
        width=64,
        heads=1,
        hidden=256,
        audio_width=64,
        block="whisper",
        tied=True,
        anchors=True,
        anchor_parts=2,
        adapter=2,
        stride=2,
        reach=5,
        spells_every=1,
        drafts=True,
        canvas=Canvas("follow", 64),
    )
    config = checkpoint.ModelConfig(
        decoder=decoder,
        encoder=TINY_ENCODER,
        encoder_name="whisper-base",
        window="clip",
        text_style="written",
        languages=("en", "de", "ja"),
        detects_language=True,
    )
    return save_random_model(tmp_path_factory.mktemp("tiny") / "tiny-clip", config)


@pytest.fixture(scope="session")
def tiny_whole_model(tiny_clip_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a decoder of Whisper's, untrained too."""
    model = checkpoint.load(tiny_clip_model, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        whisper = WhisperDecoder(WhisperDecoderConfig(51_865, width=64, layers=1, heads=1, positions=128))
        torch.nn.init.normal_(whisper.positions)
    return checkpoint.save(
        tmp_path_factory.mktemp("tiny") / "tiny-whole",
        replace(model.config, whisper=whisper.config),
        model.decoder.state_dict(),
        encoder=model.encoder.state_dict(),
        whisper=whisper.state_dict(),
        generation=model.generation,
        dtype=torch.float32,
    )


@pytest.fixture(scope="session")
def tiny_whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face's format: a Whisper of the smallest shape, untrained."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=51865,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        # Longer transcripts would only make the tests slow.
        max_target_positions=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = WhisperForConditionalGeneration(config)
    folder = tmp_path_factory.mktemp("tiny") / "tiny-whisper"
    model.save_pretrained(folder)
    return folder


def hum(seconds: float, seed: int = 0) -> np.ndarray:
    """Something to listen to: a wavering tone in noise, another for each seed."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * (150 + 40 * seed) * time + 3 * np.sin(2 * np.pi * 2 * time))
    return (0.3 * tone + 0.02 * rng.normal(size=len(time))).astype(np.float32)


@pytest.fixture
def make_wav(tmp_path: Path) -> Callable[..., Path]:
    """Writes a sound file of so many seconds: make_wav("a.wav", 1.5, seed=3) or "folder/b.flac"."""

    def make(name: str = "a.wav", seconds: float = 1.0, seed: int = 0) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, hum(seconds, seed), RATE)
        return path

    return make


@pytest.fixture
def make_manifest(tmp_path: Path, make_wav: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a manifest of clips of these durations, with their audio beside it."""

    def make(name: str, seconds: list[float], language: str = "en", text: str = "hello there") -> Path:
        lines = []
        for number, duration in enumerate(seconds):
            audio = make_wav(f"{name}-{number}.wav", duration, seed=number)
            record = {"id": f"{name}-{number}", "audio": audio.name, "duration": duration, "text": text}
            lines.append(json.dumps(record | {"language": language, "dataset": name}))
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return make
