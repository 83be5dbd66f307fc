"""Our Whisper against Hugging Face's and CTranslate2's own writer, at random weights that went through files."""

import copy
from pathlib import Path

import pytest
import torch
from random_whisper import random_whisper
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from whisfusion.tokenizer import ENDOFTEXT, LANGUAGES, get_tokenizer, whisper_id
from whisfusion.weights import load_whisper, load_whisper_weights
from whisfusion.whisper import Whisper, _suppressed, detect_language, greedy, log_likelihood

LOGITS = 2e-4  # of about 10
LIKELIHOOD = 1e-5
# Largest difference between a weight (norms about 1, all others about 0.1) and its quantised copy.
QUANTISED = {"float32": 0.0, "float16": 5e-4, "bfloat16": 4e-3, "int8": 3e-3, "int8_float16": 3e-3, "int16": 4e-4}


@pytest.fixture(scope="module")
def theirs() -> WhisperForConditionalGeneration:
    return random_whisper()


@pytest.fixture(scope="module")
def ours(theirs: WhisperForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Whisper:
    folder = tmp_path_factory.mktemp("whisper")
    theirs.save_pretrained(folder, max_shard_size="10MB")
    assert (folder / "model.safetensors.index.json").is_file()
    return load_whisper(folder)


@pytest.fixture(scope="module")
def mel_BMF() -> Tensor:  # noqa: N802
    return torch.randn(3, 80, 200, generator=torch.Generator().manual_seed(1))


def test_logits(theirs: WhisperForConditionalGeneration, ours: Whisper, mel_BMF: Tensor):
    tokens_BL = torch.randint(0, 51_865, (3, 11), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected_BLV = theirs(input_features=mel_BMF, decoder_input_ids=tokens_BL).logits
    audio_BTD = ours.encoder(mel_BMF)
    logits_BLV = ours.decoder(tokens_BL, ours.decoder.listen(audio_BTD))
    assert expected_BLV.std() > 0.5
    torch.testing.assert_close(logits_BLV, expected_BLV, rtol=0, atol=LOGITS)


def test_greedy_tokens(theirs: WhisperForConditionalGeneration, ours: Whisper, mel_BMF: Tensor):
    never, at_start = _suppressed(51_865, torch.device("cpu"))
    config = {
        "suppress_tokens": never.tolist(),
        "begin_suppress_tokens": at_start.tolist(),
        "no_timestamps_token_id": 50_363,
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": 50_259 + i for i, code in enumerate(LANGUAGES) if code != "yue"},
        "task_to_id": {"transcribe": 50_359, "translate": 50_358},
        "decoder_start_token_id": 50_258,
        "eos_token_id": ENDOFTEXT,
        "pad_token_id": ENDOFTEXT,
    }
    for name, value in config.items():
        setattr(theirs.generation_config, name, value)
    written_BL = theirs.generate(
        mel_BMF, language=["en", "de", "ja"], task="transcribe", max_new_tokens=24, num_beams=1, do_sample=False
    )
    hypotheses = greedy(ours.decoder, ours.encoder(mel_BMF), ["en", "de", "ja"], max_tokens=24)
    for hypothesis, written_L in zip(hypotheses, written_BL.tolist(), strict=True):
        expected = written_L[4:] if written_L[0] == 50_258 else written_L
        expected = expected[: expected.index(ENDOFTEXT)] if ENDOFTEXT in expected else expected
        assert [whisper_id(token, 51_865) for token in hypothesis.tokens] == expected
        assert len(set(expected)) > 1


def test_language_detection(theirs: WhisperForConditionalGeneration, ours: Whisper, mel_BMF: Tensor):
    with torch.no_grad():
        start_B1 = torch.full((3, 1), 50_258)
        logits_BV = theirs(input_features=mel_BMF, decoder_input_ids=start_B1).logits[:, -1]
    expected_B = logits_BV[:, 50_259:50_358].argmax(-1).tolist()
    detected = detect_language(ours.decoder, ours.encoder(mel_BMF))
    assert [next(iter(ranked)) for ranked in detected] == [list(LANGUAGES)[i] for i in expected_B]


def test_likelihood_is_the_loss_of_teacher_forcing(
    theirs: WhisperForConditionalGeneration, ours: Whisper, mel_BMF: Tensor
):
    candidates = [[[440, 1027], [17, 18, 19, 20, 21]], [[]], [[50_000], [300, 301, 302]]]
    scores = log_likelihood(ours.decoder, ours.encoder(mel_BMF), candidates, "fr")
    prompt = [whisper_id(token, 51_865) for token in get_tokenizer().prompt("fr")]
    for mel_MF, of_one, texts in zip(mel_BMF, scores, candidates, strict=True):
        for score, text in zip(of_one, texts, strict=True):
            # The loss is a mean over all labels but -100, which prompts have here but for its last place.
            labels = torch.tensor([[-100] * 3 + [*text, ENDOFTEXT]])
            with torch.no_grad():
                loss = theirs(
                    input_features=mel_MF[None], decoder_input_ids=torch.tensor([[*prompt, *text]]), labels=labels
                ).loss
            assert score == pytest.approx(-float(loss), abs=LIKELIHOOD)


@pytest.mark.parametrize("quantisation", list(QUANTISED))
def test_folders_written_by_ctranslate2(theirs: WhisperForConditionalGeneration, tmp_path: Path, quantisation: str):
    """Through the converter's own model loader and writer; only its tokenizer is left out."""
    converters = pytest.importorskip("ctranslate2.converters.transformers")
    spec = converters.WhisperLoader().get_model_spec(copy.deepcopy(theirs))  # it quantises in place
    spec.register_vocabulary([f"token {i}" for i in range(51_865)])
    spec.validate()
    spec.optimize(quantization=quantisation)
    spec.save(str(tmp_path))
    theirs.save_pretrained(tmp_path / "hf")
    loaded, exact = load_whisper_weights(tmp_path), load_whisper_weights(tmp_path / "hf")
    assert (loaded.encoder_config, loaded.decoder_config) == (exact.encoder_config, exact.decoder_config)
    for ours, expected in ((loaded.encoder, exact.encoder), (loaded.decoder, exact.decoder)):
        assert ours.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(
                ours[name].float(),
                x,
                rtol=0,
                atol=QUANTISED[quantisation],
                msg=lambda text, name=name: f"{name}: {text}",
            )


def test_published_names_on_the_meta_device():
    """Large-v3 and turbo as Hugging Face builds them, by name and shape."""
    from whisfusion import weights

    for layers in (32, 4):
        with torch.device("meta"):
            model = random_whisper(
                vocab_size=51_866,
                d_model=1280,
                num_mel_bins=128,
                encoder_layers=32,
                decoder_layers=layers,
                encoder_attention_heads=20,
                decoder_attention_heads=20,
                encoder_ffn_dim=5120,
                decoder_ffn_dim=5120,
                max_source_positions=1500,
            )
        state = {name: x for name, x in model.state_dict().items() if name != "proj_out.weight"}
        named = weights._rename(state, weights._HUGGING_FACE)
        loaded = weights._checked(Path("published"), named, "")
        assert loaded.encoder_config == weights.EncoderConfig()
        assert loaded.decoder_config == weights.WhisperDecoderConfig(layers=layers)
