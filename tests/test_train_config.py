import dataclasses
import json
import math
from itertools import pairwise

import pytest
from small_run import small_recipe

from whisfusion.decoder import DecoderConfig
from whisfusion.errors import OptionError
from whisfusion.train import RECIPES, Recipe
from whisfusion.train.overrides import field_names, from_json, override
from whisfusion.train.schedule import ema_decay, learning_rate, mask_ratios


@pytest.mark.parametrize(
    ("name", "masks", "peak", "warmup", "epochs"),
    [
        ("paper_stage1", (0.0, 1.0), 2e-4, 2000, 12),
        ("paper_stage2", (0.7, 1.0), 6e-5, 1000, 10),
        ("paper_stage2_uniform", (0.0, 1.0), 6e-5, 1000, 10),
    ],
)
def test_the_papers_table(name, masks, peak, warmup, epochs):
    recipe = RECIPES[name]()
    assert recipe.masks == ((0.0, *masks),)
    assert (recipe.learning_rate, recipe.warmup_steps, recipe.epochs) == (peak, warmup, epochs)
    assert recipe.betas == (0.9, 0.95)
    assert (recipe.weight_decay, recipe.floor, recipe.clip, recipe.ema_decay) == (0.1, 0.1, 1.0, 0.999)
    assert (recipe.sampler.utterances, recipe.precision, recipe.ema_ramp) == (2048, "bf16", 0)
    assert (recipe.sampler.language_alpha, recipe.sampler.dataset_alpha) == (0.3, 0.5)
    assert recipe.decoder == DecoderConfig()
    assert recipe.decoder.canvas.size == 192
    assert (recipe.window, recipe.text_style, recipe.encoder) == ("padded", "normalised", "whisper-large-v3")
    # Nothing of ours.
    assert not recipe.label_smoothing
    assert not recipe.language_share
    assert not recipe.decoder.dropout
    assert not recipe.spec_augment.numbers
    assert recipe.sampler.speeds == (1.0,)
    # Its rule for English.
    assert recipe.filters.wants("en", "CommonVoice")
    assert not recipe.filters.wants("en", "granary-ytc")
    assert recipe.filters.wants("de", "granary-ytc")


def test_the_trial_turns_to_high_masks_for_the_last_35_percent():
    recipe = RECIPES["trial"]()
    ranges = [mask_ratios(recipe, step, 3000) for step in (0, 1949, 1950, 2999)]
    assert [(r.low, r.high) for r in ranges] == [(0, 1), (0, 1), (0.7, 1), (0.7, 1)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_json(name):
    recipe = RECIPES[name]()
    assert from_json(json.loads(json.dumps(dataclasses.asdict(recipe)))) == recipe


def test_every_field_has_a_sentence():
    import ast
    import inspect

    from whisfusion.train import config

    tree = ast.parse(inspect.getsource(config))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Recipe").body
    said = {
        field.target.id
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(field.target, ast.Name)
    }
    assert said == {field.name for field in dataclasses.fields(Recipe)}


def test_any_field_can_be_given_by_name():
    recipe = override(
        RECIPES["tiny"](),
        {
            "learning_rate": "3e-4",
            "decoder.layers": "6",
            "decoder.canvas.size": "48",
            "compile": "true",
            "betas": "0.8,0.9",
            "masks": "[[0, 0, 1], [0.5, 0.7, 1]]",
            "filters.exclude": "en/*,*/noise",
            "epochs": "2",
            "sampler.seconds": "600",
        },
    )
    assert recipe.learning_rate == 3e-4
    assert recipe.decoder.layers == 6
    assert recipe.decoder.canvas.size == 48
    assert recipe.compile is True
    assert recipe.betas == (0.8, 0.9)
    assert recipe.masks == ((0, 0, 1), (0.5, 0.7, 1))
    assert recipe.filters.exclude == ("en/*", "*/noise")
    assert (recipe.epochs, recipe.steps) == (2, None)
    assert (recipe.sampler.seconds, recipe.sampler.utterances) == (600, None)


def test_an_optional_part_can_be_taken_away_and_given():
    assert override(RECIPES["tiny"](), {"random_encoder": "none"}).random_encoder is None
    given = override(RECIPES["paper_stage1"](), {"random_encoder.layers": "2"}).random_encoder
    assert given is not None
    assert (given.layers, given.width) == (2, 1280)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(OptionError) as caught:
        override(
            RECIPES["tiny"](),
            {"learning_rte": "1", "floor": "much", "decoder.layers": "0", "clip": "0", "masks": "[[0, 0.3, 2]]"},
        )
    message = str(caught.value)
    for part in ("'learning_rate'?", "floor must be a number", "layers must be at least 1", "clip", "(0.3, 2.0)"):
        assert part in message
    # A mistake inside a part is no reason to complain about what is right outside it.
    assert "audio_width" not in message


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"steps": "2.5"}, "whole number"),
        ({"compile": "yes"}, "true or false"),
        ({"precision": "fp8"}, "'auto' or 'bf16' or 'fp32'"),
        ({"betas": "[0.9]"}, "2 parts"),
        ({"random_encoder": "3"}, "object of settings"),
        ({"masks": "[[0.5, 0, 1]]"}, "start at 0"),
        ({"warmup_steps": "300", "steps": "200"}, "fewer than the 200 steps"),
        ({"noise": "0.5", "feeder": "bank"}, "stream feeder"),
        ({"feeder": "bank", "window": "padded"}, "clip windows alone"),
        ({"learns": "speller"}, "needs a model with an adapter"),
        ({"learns": "speller", "decoder.adapter": "1"}, "give decoder.speller"),
        ({"feeder": "features"}, "give learns speller"),
        ({"feeder": "features", "sampler.speeds": "[0.9, 1.0]"}, "of spec_augment give spans alone"),
    ],
)
def test_what_does_not_fit_is_refused(settings, part):
    with pytest.raises(OptionError, match=part):
        override(RECIPES["tiny"](), settings)


def test_settings_inside_parts_have_names():
    names = field_names(Recipe)
    assert {"decoder.canvas.rule", "sampler.join", "spec_augment.bands", "dev.candidates"} <= set(names)


def test_the_learning_rate_rises_then_falls_to_its_floor():
    recipe = small_recipe(learning_rate="1", warmup_steps="4", floor="0.1", steps="104")
    rates = [learning_rate(recipe, step, 104) for step in range(104)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[54] == pytest.approx(0.55)
    assert all(before > after for before, after in pairwise(rates[4:]))
    assert learning_rate(recipe, 104, 104) == pytest.approx(0.1)


def test_the_average_forgets_a_short_runs_start():
    recipe = small_recipe(ema_decay="0.9995", ema_ramp="20")
    assert ema_decay(recipe, 0) == pytest.approx(1 / 21)
    assert ema_decay(recipe, 10**6) == 0.9995
    assert ema_decay(RECIPES["paper_stage1"](), 0) == 0.999
    assert not math.isclose(ema_decay(recipe, 100), 0.9995)
