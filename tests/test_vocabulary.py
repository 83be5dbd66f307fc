"""Lists of tokens per language: packed, kept in a model folder, applied to every batch."""

import shutil

import pytest
import torch
from conftest import hum

import whisfusion
from whisfusion import checkpoint
from whisfusion.checkpoint import load, read_config
from whisfusion.cli import main
from whisfusion.errors import ModelError, OptionError
from whisfusion.tokenizer import ENDOFTEXT, MASK, SAMPLEABLE, get_tokenizer
from whisfusion.vocabulary import Vocabulary, token_list

CPU = torch.device("cpu")


def random_list(seed, size=400):
    return torch.randperm(ENDOFTEXT, generator=torch.Generator().manual_seed(seed))[:size].tolist()


@pytest.fixture
def folder(tiny_clip_model, tmp_path):
    return shutil.copytree(tiny_clip_model, tmp_path / "model")


def load_with_opinions(folder):
    transcriber = whisfusion.load(folder, device="cpu", dtype="float32")
    transcriber.system.model.decoder.norm.weight.mul_(30)
    return transcriber


def test_a_list_holds_the_tokens_of_its_texts_every_byte_and_nothing_else():
    tokenizer = get_tokenizer()
    listed = token_list(["good morning", "good evening"], least=1)
    assert set(tokenizer.encode("good morning evening")) <= set(listed)
    assert len(listed) <= 256 + len(tokenizer.encode("good morning evening"))
    assert tokenizer.decode(tokenizer.encode("ż")) == "ż"
    assert {spelling for i, spelling in enumerate(tokenizer.token_bytes()) if i in listed} >= {
        bytes([octet]) for octet in range(256)
    }
    twice = token_list(["good morning", "good evening"], least=2)
    assert set(tokenizer.encode("good")) <= set(twice)
    assert not set(tokenizer.encode("morning")) & set(twice)


def test_packing_loses_nothing():
    vocabulary = Vocabulary({"en": random_list(0), "de": [0, ENDOFTEXT - 1], "ja": []})
    packed = vocabulary.pack()
    assert all(octets.dtype == torch.uint8 and octets.numel() < 6300 for octets in packed.values())
    again = Vocabulary.unpack(packed)
    assert list(again) == ["en", "de", "ja"]
    assert all(torch.equal(again[language], vocabulary[language]) for language in vocabulary)
    assert again["ja"].tolist() == [ENDOFTEXT]
    assert again["de"].tolist() == [0, ENDOFTEXT - 1, ENDOFTEXT]


def test_what_is_no_list_is_refused():
    with pytest.raises(OptionError, match="'xx' is not a language"):
        Vocabulary({"xx": [1]})
    with pytest.raises(OptionError, match="'en' must be those of text"):
        Vocabulary({"en": [SAMPLEABLE]})
    with pytest.raises(ModelError, match="one bit a token"):
        Vocabulary.unpack({"en": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(ModelError, match="'xx'"):
        Vocabulary.unpack({"xx": Vocabulary({"en": []}).pack()["en"]})


def test_columns_of_one_language_are_its_list_and_of_several_all_ids_with_some_not_allowed():
    vocabulary = Vocabulary({"en": random_list(0), "de": random_list(1)})
    alone = vocabulary.columns(["de", "de"], CPU)
    assert torch.equal(alone.ids_V, vocabulary["de"])
    assert alone.allowed_BV is None
    mixed = vocabulary.columns(["en", "fr", "de"], CPU)
    assert torch.equal(mixed.ids_V, torch.arange(SAMPLEABLE))
    assert torch.equal(mixed.ids_V[mixed.allowed_BV[0]], vocabulary["en"])
    assert mixed.allowed_BV[1].all()
    assert torch.equal(mixed.ids_V[mixed.allowed_BV[2]], vocabulary["de"])


def test_nothing_outside_the_list_is_written(folder):
    before = load_with_opinions(folder).transcribe(hum(2.0), language="en", temperature=1.0)
    vocabulary = Vocabulary({"en": random_list(0)})
    assert not set(before.tokens) <= set(vocabulary["en"].tolist())
    checkpoint.add(folder, vocabulary)
    model = load_with_opinions(folder)
    for temperature in (0.0, 0.1, 1.0):
        transcript = model.transcribe(hum(2.0), language="en", temperature=temperature)
        assert transcript.tokens
        assert set(transcript.tokens) <= set(vocabulary["en"].tolist())


def test_a_list_of_every_token_changes_nothing(folder):
    clips = [hum(1.0), hum(2.5, 1)]
    before = load_with_opinions(folder).transcribe(clips, language="en", temperature=1.0)
    checkpoint.add(folder, Vocabulary({"en": range(ENDOFTEXT)}))
    after = load_with_opinions(folder).transcribe(clips, language="en", temperature=1.0)
    assert [t.tokens for t in after] == [t.tokens for t in before]


def test_a_clip_is_the_same_alone_and_among_other_languages(folder):
    checkpoint.add(folder, Vocabulary({"en": random_list(0), "de": random_list(1)}))
    model = load_with_opinions(folder)
    clips, languages = [hum(1.0 + 0.3 * i, i) for i in range(6)], ["en", "de", "ja", "de", "en", "en"]
    together = model.transcribe(clips, language=languages)
    for clip, language, transcript in zip(clips, languages, together, strict=True):
        alone = model.transcribe(clip, language=language)
        assert [c.text for c in alone.segments[0].candidates] == [c.text for c in transcript.segments[0].candidates]
        assert alone.tokens == transcript.tokens


def test_the_list_is_a_hashed_file_of_the_folder(folder):
    checkpoint.add(folder, Vocabulary({"en": random_list(0)}))
    checkpoint.add(folder, Vocabulary({"de": random_list(1)}))
    _, files = read_config(folder)
    assert list(load(folder, dtype=torch.float32).vocabulary) == ["de"]
    path = folder / "vocabulary.safetensors"
    assert path.name in files
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(ModelError, match=r"vocabulary\.safetensors .*sha256"):
        load(folder, dtype=torch.float32)


def test_a_language_that_the_model_does_not_know_is_refused(folder):
    with pytest.raises(OptionError, match="does not know 'fr', only en, de, ja"):
        checkpoint.add(folder, Vocabulary({"fr": []}))


def test_the_command_takes_manifests_and_text(folder, tmp_path, make_manifest, capsys):
    manifest = make_manifest("speech", [0.5], text="Good morning, everyone.")
    text = tmp_path / "saetze.txt"
    text.write_text("Guten Morgen allerseits.\nGuten Morgen.\n", encoding="utf-8")
    counted = ["--data", str(manifest), "--text", f"de={text}"]
    assert main(["vocabulary", str(folder), *counted]) == 0
    assert "de  2" in capsys.readouterr().out
    vocabulary = load(folder, dtype=torch.float32).vocabulary
    again = tmp_path / "again"
    assert main(["export", str(folder), "--out", str(again), "--encoder"]) == 0
    assert torch.equal(load(again, dtype=torch.float32).vocabulary["en"], vocabulary["en"])
    tokenizer = get_tokenizer()
    assert set(tokenizer.encode("Good morning, everyone.")) <= set(vocabulary["en"].tolist())
    assert set(tokenizer.encode("Guten Morgen allerseits.")) <= set(vocabulary["de"].tolist())
    held_out = make_manifest("held-out", [0.5], text="Good morning, xylophone.")
    words = ["vocabulary", str(folder), "--data", str(manifest), "--check", str(held_out)]
    assert main(words) == 0
    unseen = len(set(tokenizer.encode("Good morning, xylophone.")) - set(vocabulary["en"].tolist()))
    share = 100 * unseen / len(tokenizer.encode("Good morning, xylophone."))
    assert unseen > 0
    assert f"without {share:.2f} % of the tokens to check" in capsys.readouterr().out
    assert main(["vocabulary", str(folder)]) == 2
    assert main(["vocabulary", str(folder), "--text", str(text)]) == 2
    assert main(["vocabulary", str(folder), "--text", f"fr={text}"]) == 2
    assert "does not know 'fr'" in capsys.readouterr().err


@pytest.mark.parametrize("form", [["--int8"], []])
def test_embeddings_that_nobody_needs_can_be_dropped(folder, tmp_path, capsys, form):
    assert main(["export", str(folder), "--out", str(tmp_path / "no"), "--drop_unused"]) == 2
    assert "whisfusion vocabulary" in capsys.readouterr().err
    vocabulary = Vocabulary({"de": random_list(1), "en": random_list(2), "ja": []})
    checkpoint.add(folder, vocabulary)
    whole, small = tmp_path / "whole", tmp_path / "small"
    for out, more in ((whole, []), (small, ["--drop_unused"])):
        assert main(["export", str(folder), "--out", str(out), "--encoder", *form, *more]) == 0
    sizes = [sum(file.stat().st_size for file in out.glob("model*")) for out in (whole, small)]
    assert sizes[1] < 0.8 * sizes[0]
    before, after = (load(out, dtype=torch.float32).decoder.state_dict() for out in (whole, small))
    tokens = vocabulary.tokens()
    assert {MASK, ENDOFTEXT, *get_tokenizer().prompt("ja"), *vocabulary["de"].tolist()} <= {*tokens.tolist()}
    assert torch.equal(after["embed.weight"][tokens], before["embed.weight"][tokens])
    assert all(torch.equal(value, after[name]) for name, value in before.items() if name != "embed.weight")
    dropped = torch.ones(len(before["embed.weight"]), dtype=torch.bool).index_fill(0, tokens, value=False)
    mean = before["embed.weight"][tokens].mean(0)
    assert (after["embed.weight"][dropped] - mean).abs().max() < 1e-5
