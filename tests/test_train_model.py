"""Where runs start: random weights, a Whisper, a model folder."""

from dataclasses import replace

import pytest
import torch
from small_run import CLIPS, SMALL, small_args, small_recipe

from whisfusion import checkpoint
from whisfusion.errors import OptionError
from whisfusion.train import RECIPES, TrainArgs, main
from whisfusion.train.model import adopt, random_encoder, starting_point
from whisfusion.weights import load_whisper_weights


def test_a_seed_decides_the_start():
    recipe = small_recipe()
    one, same, other = (starting_point(r, None) for r in (recipe, recipe, replace(recipe, seed=43)))
    for half in ("decoder", "encoder"):
        state = getattr(one, half).state_dict()
        assert all(torch.equal(value, getattr(same, half).state_dict()[name]) for name, value in state.items())
    assert not torch.equal(one.decoder.embed.weight, other.decoder.embed.weight)
    assert not torch.equal(one.encoder.conv1.weight, other.encoder.conv1.weight)


def test_a_random_encoder_hears_something():
    """With torch's own start, 99 % of what its features vary by is the position."""
    config = small_recipe().random_encoder
    assert config is not None
    features_BTD = random_encoder(config, 42)(torch.randn(16, 80, 100, generator=torch.Generator().manual_seed(0)))
    between_clips = features_BTD.var(0).mean() / features_BTD.flatten(0, 1).var(0).mean()
    assert between_clips > 0.4


def test_whispers_decoder_is_a_start(tiny_whisper):
    settings = {
        "decoder__block": "whisper",
        "decoder__canvas__size": "16",
        "random_encoder": "none",
        "start": "whisper",
    }
    sizes = {"decoder__width": "64", "decoder__audio_width": "64", "decoder__hidden": "256", "decoder__heads": "1"}
    recipe = small_recipe(**settings, **sizes, encoder=str(tiny_whisper))
    start, whisper = starting_point(recipe, None), load_whisper_weights(tiny_whisper)
    name = "blocks.0.cross_attn.q.weight"
    assert torch.equal(start.decoder.state_dict()[name], whisper.decoder[name])
    assert torch.equal(start.encoder.state_dict()["conv1.weight"], whisper.encoder["conv1.weight"])
    # A folder of one's own has no name that others know: the encoder goes with the model.
    assert start.bundles_encoder


def test_a_model_brings_its_architecture(tiny_clip_model):
    recipe = adopt(
        replace(RECIPES["finetune"](), decoder=replace(RECIPES["finetune"]().decoder, dropout=0.1)),
        str(tiny_clip_model),
    )
    config, _ = checkpoint.read_config(tiny_clip_model)
    assert recipe.decoder == replace(config.decoder, dropout=0.1)
    assert (recipe.window, recipe.text_style) == ("clip", "written")
    loaded = checkpoint.load(tiny_clip_model, dtype=torch.float32).decoder.state_dict()
    start = starting_point(recipe, str(tiny_clip_model)).decoder.state_dict()
    assert all(torch.equal(value, start[name]) for name, value in loaded.items())


def test_a_model_without_drafts_can_learn_to_take_them(tiny_model):
    recipe = RECIPES["finetune"]()
    recipe = adopt(replace(recipe, decoder=replace(recipe.decoder, drafts=True)), str(tiny_model))
    loaded = checkpoint.load(tiny_model, dtype=torch.float32).decoder.state_dict()
    start = starting_point(recipe, str(tiny_model)).decoder.state_dict()
    assert not start.pop("draft.weight").any()
    assert start.keys() == loaded.keys()
    assert all(torch.equal(value, start[name]) for name, value in loaded.items())


def test_an_adapter_can_be_given_convolutions(tiny_clip_model):
    loaded = checkpoint.load(tiny_clip_model, dtype=torch.float32)
    bare = replace(loaded.config, decoder=replace(loaded.config.decoder, reach=0))
    state = {name: value for name, value in loaded.decoder.state_dict().items() if ".nearby." not in name}
    folder = checkpoint.save(tiny_clip_model / "bare", bare, state, encoder=loaded.encoder.state_dict())
    recipe = RECIPES["finetune"]()
    recipe = adopt(replace(recipe, decoder=replace(recipe.decoder, adapter=2, reach=7)), str(folder))
    assert recipe.decoder.reach == 7
    start = starting_point(recipe, str(folder)).decoder
    assert all(torch.equal(value.bfloat16(), start.state_dict()[name].bfloat16()) for name, value in state.items())
    assert not any(nearby.out.weight.any() for nearby in start.adapter.nearby)


def test_a_fine_tuned_model_keeps_what_it_knew(tiny_clip_model, tmp_path):
    settings = {"steps": "2", "warmup_steps": "1", "sampler.utterances": "8", "learning_rate": "1e-4"}
    args = TrainArgs("finetune", data=(str(CLIPS),), out=tmp_path / "run", settings=settings, device="cpu", workers=1)
    assert main(replace(args, init_from=str(tiny_clip_model)))
    config, files = checkpoint.read_config(tmp_path / "run" / "model")
    assert config.languages == ("en", "de", "ja")
    assert config.detects_language
    assert config.training["recipe"] == "finetune"
    generation = [
        checkpoint.load(path, dtype=torch.float32).generation for path in (tiny_clip_model, args.out / "model")
    ]
    assert generation[0] == generation[1]
    assert "encoder.safetensors" in files
    before = checkpoint.load(tiny_clip_model, dtype=torch.float32).decoder.state_dict()
    after = checkpoint.load(tmp_path / "run" / "model", dtype=torch.float32).decoder.state_dict()
    assert all(torch.allclose(value, after[name], atol=1e-2) for name, value in before.items())
    assert not torch.equal(before["embed.weight"], after["embed.weight"])


def test_whispers_decoder_stays_unless_there_are_other_languages(tiny_whole_model, tmp_path):
    settings = {"steps": "2", "warmup_steps": "1", "sampler.utterances": "8"}
    args = TrainArgs("finetune", data=(str(CLIPS),), out=tmp_path / "run", settings=settings, device="cpu", workers=1)
    assert main(replace(args, init_from=str(tiny_whole_model)))
    before, after = (checkpoint.load(folder, dtype=torch.float32) for folder in (tiny_whole_model, args.out / "model"))
    assert after.config.whisper == before.config.whisper
    state = after.whisper.state_dict()
    assert all(
        torch.equal(value.bfloat16().float(), state[name]) for name, value in before.whisper.state_dict().items()
    )
    # As it may have been stored without what other languages are written in.
    ours = replace(before.config, languages=("de", "ja"))
    parts = {"encoder": before.encoder.state_dict(), "whisper": before.whisper.state_dict()}
    folder = checkpoint.save(tmp_path / "ours", ours, before.decoder.state_dict(), **parts)
    assert main(replace(args, out=tmp_path / "other", init_from=str(folder)))
    after = checkpoint.load(tmp_path / "other" / "model", dtype=torch.float32)
    assert after.config.languages == ("de", "ja", "en")
    assert after.whisper is None


def test_a_decoder_that_does_not_fit_its_encoder_is_refused(tiny_whisper, tmp_path):
    settings = SMALL | {"random_encoder": "none", "encoder": str(tiny_whisper)}
    del settings["random_encoder.layers"], settings["random_encoder.width"]
    with pytest.raises(OptionError, match="audio_width 32 is not the encoder's width 64"):
        main(replace(small_args(tmp_path / "run"), settings=settings))
