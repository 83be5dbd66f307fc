import json
from dataclasses import replace

import pytest
import torch

from whisfusion import hub
from whisfusion.checkpoint import ModelConfig, load, read_config, save, sha256_of
from whisfusion.decoder import Canvas, DecoderConfig, DiffusionDecoder
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.errors import ModelError
from whisfusion.pdd import PDDOptions
from whisfusion.weights import fingerprint, load_whisper_weights

ENCODER = EncoderConfig(mels=80, width=64, layers=1, heads=1)
CONFIG = ModelConfig(
    decoder=DecoderConfig(
        layers=1, width=64, heads=1, hidden=64, audio_width=64, anchors=True, canvas=Canvas("follow", 64)
    ),
    encoder=ENCODER,
    encoder_name="whisper-tiny",
    window="clip",
    text_style="written",
    languages=("en", "de"),
    detects_language=True,
    training={"recipe": "none", "steps": 0},
)
GENERATION = PDDOptions(candidates=7, steps=2, trajectory=(1.0, 0.5), temperature=0.3)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    decoder, encoder = DiffusionDecoder(CONFIG.decoder), WhisperEncoder(ENCODER)
    return save(
        tmp_path / "model",
        CONFIG,
        decoder.state_dict(),
        encoder=encoder.state_dict(),
        generation=GENERATION,
        dtype=torch.float32,
        file_bytes=8 << 20,
    )


def test_what_is_saved_is_what_is_loaded(folder):
    torch.manual_seed(0)
    decoder = DiffusionDecoder(CONFIG.decoder)
    model = load(folder, dtype=torch.float32)
    assert model.config == CONFIG
    assert model.generation == GENERATION
    for name, value in decoder.state_dict().items():
        assert torch.equal(model.decoder.state_dict()[name], value)
    assert not any(p.requires_grad for p in [*model.decoder.parameters(), *model.encoder.parameters()])
    assert not model.decoder.training


def test_int8_keeps_every_row_within_half_a_step(folder):
    before = load(folder, dtype=torch.float32).decoder.state_dict()
    save(
        folder,
        CONFIG,
        before,
        encoder=WhisperEncoder(ENCODER).state_dict(),
        generation=GENERATION,
        dtype=torch.float16,
        int8=True,
    )
    after = load(folder, dtype=torch.float32).decoder.state_dict()
    for name, value in before.items():
        if value.dim() < 2:
            assert torch.equal(after[name], value.half().float())
            continue
        rows, again = value.flatten(1), after[name].flatten(1)
        step = rows.abs().amax(1, keepdim=True) / 127
        assert ((again - rows).abs() <= 0.5001 * step).all()
    size = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    assert size < 1.1 * sum(value.numel() for value in before.values())


def test_large_models_are_split_and_hashed(folder):
    _, files = read_config(folder)
    assert len([name for name in files if name.startswith("model-")]) >= 2
    assert all(sha256_of(folder / name) == digest for name, digest in files.items())


def test_saving_again_leaves_no_stale_files(folder):
    save(folder, CONFIG, DiffusionDecoder(CONFIG.decoder).state_dict(), encoder=WhisperEncoder(ENCODER).state_dict())
    _, files = read_config(folder)
    assert {path.name for path in folder.glob("*.safetensors")} == set(files)
    assert load(folder, dtype=torch.float32).config == CONFIG


def test_a_missing_file_is_named(folder):
    (folder / "encoder.safetensors").unlink()
    with pytest.raises(ModelError, match=r"encoder\.safetensors is missing"):
        load(folder, dtype=torch.float32)


def test_an_altered_file_is_named(folder):
    path = folder / "encoder.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"encoder\.safetensors .*sha256"):
        load(folder, dtype=torch.float32)


def edit(folder, change, name="config.json"):
    path = folder / name
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update(format=99), "format 99"),
        (lambda raw: raw.pop("format"), "--system whisper"),
        (lambda raw: raw.update(colour="red"), "colour"),
        (lambda raw: raw["decoder"].update(heads=7), "heads"),
        (lambda raw: raw["decoder"].update(width=32), "not fit|width"),
        (lambda raw: raw.update(files={}), "no weight files"),
        (lambda raw: raw.update(files={"../x.safetensors": "0"}), "not safetensors in this folder"),
        (lambda raw: raw.update(files={"weights.bin": "0"}), "not safetensors in this folder"),
        (lambda raw: raw["decoder"].update(layers=2), r"blocks\.1.* is missing"),
        (lambda raw: raw["decoder"].update(anchors=False), "is unknown"),
        (lambda raw: raw.update(decoder=None), "where settings should be"),
        (lambda raw: raw.update(languages="en"), "languages must be codes"),
        (lambda raw: raw.update(languages=[]), "languages must be codes"),
    ],
)
def test_a_config_that_does_not_fit_says_why(folder, change, words):
    edit(folder, change)
    with pytest.raises(ModelError, match=words):
        load(folder, dtype=torch.float32)


def test_other_folders_are_refused(tmp_path, folder):
    with pytest.raises(ModelError, match="no config"):
        load(tmp_path, dtype=torch.float32)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        load(folder, dtype=torch.float32)


def test_a_bad_generation_config_is_refused(folder):
    edit(folder, lambda raw: raw.update(candidates=0), "generation_config.json")
    with pytest.raises(ModelError, match=r"candidates \(K\)"):
        load(folder, dtype=torch.float32)


def test_nothing_but_safetensors_and_json_is_read(folder):
    (folder / "model.bin").write_bytes(b"\x80\x04")
    (folder / "model.safetensors").write_bytes(b"not listed, not read")
    load(folder, dtype=torch.float32)


def test_without_an_encoder_the_folder_names_the_whisper_to_take_it_from(tmp_path, tiny_whisper, monkeypatch):
    published = load_whisper_weights(tiny_whisper)
    monkeypatch.setattr(hub, "resolve", lambda name: tiny_whisper if name == "whisper-tiny" else None)
    config = replace(CONFIG, encoder=published.encoder_config, encoder_sha256=fingerprint(published.encoder))
    decoder = DiffusionDecoder(config.decoder).state_dict()
    folder = save(tmp_path / "model", config, decoder)
    assert not list(folder.glob("encoder*"))
    loaded = load(folder, dtype=torch.float32).encoder.state_dict()
    assert all(torch.equal(loaded[name], value.float()) for name, value in published.encoder.items())
    save(folder, replace(config, encoder_sha256="0" * 64), decoder)
    with pytest.raises(ModelError, match="not those the model was trained with"):
        load(folder, dtype=torch.float32)


def test_a_fingerprint_does_not_depend_on_the_format():
    half = {"b": torch.randn(3, 4).half(), "a": torch.randn(5).half()}
    assert fingerprint(half) == fingerprint({name: half[name].float() for name in ("a", "b")})
    assert fingerprint(half) != fingerprint(half | {"a": half["a"] + 1})
