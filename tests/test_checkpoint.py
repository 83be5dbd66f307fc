import json
from dataclasses import replace

import pytest
import torch

from whisfusion import hub
from whisfusion.checkpoint import ModelConfig, load, read_config, save, sha256_of
from whisfusion.decoder import Canvas, DecoderConfig, DiffusionDecoder
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.errors import ModelError, OptionError
from whisfusion.pdd import PDDOptions
from whisfusion.tokenizer import ENDOFTEXT
from whisfusion.vocabulary import Vocabulary
from whisfusion.weights import fingerprint, load_whisper_weights
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig

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
WHISPER = WhisperDecoderConfig(vocab_size=51_865, width=64, layers=1, heads=1, positions=16)
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


@pytest.fixture
def whisper():
    torch.manual_seed(1)
    whisper = WhisperDecoder(WHISPER)
    torch.nn.init.normal_(whisper.positions)
    return whisper.state_dict()


def save_with_whisper(folder, whisper, **options):
    torch.manual_seed(0)
    decoder, encoder = DiffusionDecoder(CONFIG.decoder).state_dict(), WhisperEncoder(ENCODER).state_dict()
    options = {"dtype": torch.float32, **options}
    return save(folder, replace(CONFIG, whisper=WHISPER), decoder, encoder=encoder, whisper=whisper, **options)


def test_whispers_decoder_is_part_of_the_folder(tmp_path, whisper):
    folder = save_with_whisper(tmp_path / "model", whisper, file_bytes=8 << 20)
    assert len(list(folder.glob("whisper-*.safetensors"))) > 1
    model = load(folder, dtype=torch.float32)
    assert model.config == replace(CONFIG, whisper=WHISPER)
    assert model.whisper is not None
    assert model.whisper.state_dict().keys() == whisper.keys()
    assert all(torch.equal(model.whisper.state_dict()[name], value) for name, value in whisper.items())
    assert not any(p.requires_grad for p in model.whisper.parameters())
    # Saved without it, nothing is left of it.
    save(folder, CONFIG, model.decoder.state_dict(), encoder=model.encoder.state_dict())
    assert not list(folder.glob("whisper*"))
    assert load(folder, dtype=torch.float32).whisper is None
    assert "whisper" not in json.loads((folder / "config.json").read_text())


def test_of_whispers_tokens_those_of_the_vocabulary_and_all_of_prompts_are_kept(tmp_path, whisper):
    vocabulary = Vocabulary({"en": range(100, 900), "de": range(40_000, 40_300)})
    tokens = vocabulary.tokens()
    folder = save_with_whisper(tmp_path / "model", whisper, tokens=tokens)
    assert (folder / "whisper.safetensors").stat().st_size < 0.2 * sum(4 * value.numel() for value in whisper.values())
    after = load(folder, dtype=torch.float32).whisper.state_dict()
    kept = torch.zeros(WHISPER.vocab_size, dtype=torch.bool)
    kept[tokens[tokens < ENDOFTEXT]] = True
    # Ids of languages and of what follows them are not the same in all Whispers.
    kept[ENDOFTEXT:] = True
    before_VD, after_VD = whisper["embed.weight"], after["embed.weight"]
    assert torch.equal(after_VD[kept], before_VD[kept])
    torch.testing.assert_close(after_VD[~kept], before_VD[kept].mean(0).expand_as(after_VD[~kept]), rtol=0, atol=1e-5)
    assert all(torch.equal(value, after[name]) for name, value in whisper.items() if name != "embed.weight")


def test_with_fewer_bits_the_encoder_still_has_eight(tmp_path, whisper):
    folder = save_with_whisper(tmp_path / "model", whisper, dtype=torch.float16, int8=True, bits=6)
    model = load(folder, dtype=torch.float32)
    assert model.stored_int8
    torch.manual_seed(0)
    decoder, encoder = DiffusionDecoder(CONFIG.decoder).state_dict(), WhisperEncoder(ENCODER).state_dict()
    for module, before, top in (
        (model.decoder, decoder, 31),
        (model.encoder, encoder, 127),
        (model.whisper, whisper, 31),
    ):
        after = module.state_dict()
        for name, value in before.items():
            if value.dim() < 2:
                continue
            rows, again = value.flatten(1), after[name].flatten(1)
            step = rows.abs().amax(1, keepdim=True) / top
            assert ((again - rows).abs() <= 0.5001 * step).all()
    size = (folder / "whisper.safetensors").stat().st_size
    assert size < 0.8 * sum(value.numel() for value in whisper.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 2}, r"blocks\.1.* is missing"),
        ({"positions": 32}, r"positions has shape \(16, 64\), not \(32, 64\)"),
        ({"vocab_size": 51_866}, "embed.weight has shape"),
        ({"width": 32}, "whisper width 32 is not the encoder's width 64"),
    ],
)
def test_a_whisper_that_does_not_fit_says_why(tmp_path, whisper, change, words):
    folder = save_with_whisper(tmp_path / "model", whisper)
    edit(folder, lambda raw: raw["whisper"].update(change))
    with pytest.raises(ModelError, match=words):
        load(folder, dtype=torch.float32)


def test_whispers_decoder_and_its_shape_go_together(tmp_path, whisper):
    decoder = DiffusionDecoder(CONFIG.decoder).state_dict()
    for config, state in ((CONFIG, whisper), (replace(CONFIG, whisper=WHISPER), None)):
        with pytest.raises(OptionError, match="goes with its weights"):
            save(tmp_path / "model", config, decoder, whisper=state)


def test_a_folder_of_0_1_with_a_detector_is_still_read(folder):
    def change(raw):
        (folder / "detector.safetensors").write_bytes((folder / "encoder.safetensors").read_bytes())
        raw["detector"] = {"layers": 4, "hidden": 128, "width": 64, "heads": 8}
        raw["files"]["detector.safetensors"] = sha256_of(folder / "detector.safetensors")

    edit(folder, change)
    assert load(folder, dtype=torch.float32).config == CONFIG


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
