"""A speller that learns alone: everything below it is frozen, heard once, and stays what it was."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import CLIPS

from whisfusion import checkpoint
from whisfusion.data.feature_bank import build_feature_bank
from whisfusion.data.manifest import load_samples, read_manifest
from whisfusion.errors import OptionError
from whisfusion.tokenizer import get_tokenizer
from whisfusion.train import RECIPES, TrainArgs, main
from whisfusion.train.model import adopt, ears, heard_by, starting_point
from whisfusion.vocabulary import Vocabulary
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig

SETTINGS = {
    "epochs": "none",
    "steps": "30",
    "warmup_steps": "2",
    "log_every": "15",
    "learning_rate": "3e-3",
    "decoder.speller": "1",
    "sampler.seconds": "60",
    "precision": "fp32",
}


@pytest.fixture(scope="module")
def base(tiny_clip_model, tmp_path_factory) -> Path:
    """A model with a list of tokens and with Whisper's decoder, kept as int8."""
    model = checkpoint.load(tiny_clip_model, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("speller") / "base"
    whisper = WhisperDecoder(WhisperDecoderConfig(51_865, width=64, layers=1, heads=1, positions=64))
    torch.nn.init.normal_(whisper.positions)
    config = replace(model.config, experimental=("de",), whisper=whisper.config)
    state, heard = model.decoder.state_dict(), model.encoder.state_dict()
    told = whisper.state_dict()
    checkpoint.save(folder, config, state, encoder=heard, whisper=told, generation=model.generation, int8=True, bits=6)
    tokens = {code: torch.tensor(sorted({*get_tokenizer().encode("one two three"), 50257})) for code in ("en", "de")}
    checkpoint.add(folder, Vocabulary(tokens))
    return folder


def arguments(base: Path, out: Path, **more: str) -> TrainArgs:
    data = (str(CLIPS),)
    return TrainArgs(
        "speller",
        data=data,
        dev=data,
        out=out,
        settings=SETTINGS | {"dev_clips": "4"} | {name.replace("__", "."): text for name, text in more.items()},
        init_from=str(base),
        device="cpu",
        workers=1,
    )


@pytest.fixture(scope="module")
def run(base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("speller") / "run"
    assert main(arguments(base, folder))
    return folder


def test_it_alone_learns_and_the_rest_stays_to_the_last_bit(base, run):
    before, after = (checkpoint.load(folder, dtype=torch.float32) for folder in (base, run / "model"))
    state = after.decoder.state_dict()
    new = {name for name in state if name.startswith("speller.")}
    assert {name for name in state if name not in new} == before.decoder.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in before.decoder.state_dict().items())
    heard = after.encoder.state_dict()
    assert all(torch.equal(value, heard[name]) for name, value in before.encoder.state_dict().items())
    assert state["speller.nearby.0.out.weight"].any()
    assert after.config.decoder.speller == 1
    assert (after.config.languages, after.config.experimental) == (before.config.languages, ("de",))
    assert after.generation == before.generation
    # What it may write is more than before: there is what it was taught.
    assert after.vocabulary is not None
    assert before.vocabulary is not None
    assert {*before.vocabulary["en"].tolist()} < {*after.vocabulary["en"].tolist()}
    assert torch.equal(before.vocabulary["de"], after.vocabulary["de"])
    # The encoder that it listens to is the same.
    assert before.whisper is not None
    assert after.whisper is not None
    assert after.config.whisper == before.config.whisper
    assert all(torch.equal(value, after.whisper.state_dict()[n]) for n, value in before.whisper.state_dict().items())


def test_the_loss_falls(run):
    rows = (run / "log.csv").read_text().splitlines()
    column = rows[0].split(",").index("ctc")
    first, last = (float(row.split(",")[column]) for row in (rows[1], rows[-1]))
    assert 0 < last < first


def test_what_is_kept_is_what_the_adapter_hears(base, run):
    start = starting_point(adopt(RECIPES["speller"](), str(base)), str(base))
    device = torch.device("cpu")
    listen = ears(start, device)
    assert json.loads((run / "features" / "features.jsonl").read_text().splitlines()[0])["model"] == heard_by(
        start, device
    )
    lines = [json.loads(line) for line in (run / "features" / "features.jsonl").read_text().splitlines()[1:]]
    kept = np.fromfile(run / "features" / "features.f16", dtype=np.float16).reshape(-1, 64)
    clips = {f"{u.dataset}/{u.id}": u for u in read_manifest(CLIPS)}
    assert len(lines) == len(clips)
    assert sum(line["place"][1] for line in lines) + 1 == len(kept)
    for line in lines[::16]:
        first, count, samples = line["place"]
        sound = load_samples(clips[line["clip"]])
        assert len(sound) == samples
        assert np.array_equal(kept[first : first + count], listen(sound).half().numpy())


def bank_of(folder: Path, model: str = "a"):
    heard = []

    def listen(samples: np.ndarray) -> torch.Tensor:
        heard.append(len(samples))
        return torch.full((3 + len(heard), 2), float(len(heard)))

    bank = build_feature_bank(read_manifest(CLIPS)[:4], listen, folder, model=model, width=2, per_second=25)
    return bank, heard


def test_a_clip_is_heard_once(tmp_path):
    first, heard = bank_of(tmp_path)
    again, more = bank_of(tmp_path)
    assert (len(heard), len(more)) == (4, 0)
    assert torch.equal(first.frames_NM, again.frames_NM)
    assert not first.frames_NM[0].any()
    assert first.counts_VC.tolist() == [[4, 5, 6, 7]]
    assert [first.frames_NM[place, 0].item() for place in first.firsts_VC[0]] == [1, 2, 3, 4]
    assert (first.per_second, first.tail) == (25, 4)


@pytest.mark.parametrize("cut", ["features.f16", "features.jsonl"])
def test_what_a_stop_cut_short_is_heard_again(tmp_path, cut):
    whole, _ = bank_of(tmp_path)
    path = tmp_path / cut
    path.write_bytes(path.read_bytes()[:-5])
    again, heard = bank_of(tmp_path)
    assert len(heard) == 1
    assert again.counts_VC.tolist() == [[4, 5, 6, 4]]
    assert torch.equal(again.frames_NM[:-4], whole.frames_NM[: len(again.frames_NM) - 4])


def test_what_another_model_heard_is_refused(tmp_path):
    bank_of(tmp_path)
    with pytest.raises(OptionError, match="what another model heard"):
        bank_of(tmp_path, model="b")


def test_two_clips_of_one_name_are_refused(tmp_path):
    clips = read_manifest(CLIPS)[:2]
    clips[1] = replace(clips[1], id=clips[0].id)
    with pytest.raises(OptionError, match="two clips are called"):
        build_feature_bank(clips, lambda _: torch.ones(4, 2), tmp_path, model="a", width=2, per_second=25)


def test_positions_that_are_gone_are_heard_again(tmp_path):
    bank_of(tmp_path)
    (tmp_path / "features.f16").unlink()
    again, heard = bank_of(tmp_path)
    assert len(heard) == 4
    assert again.counts_VC.tolist() == [[4, 5, 6, 7]]
    assert not again.frames_NM[0].any()


def test_it_needs_a_model_to_stand_on(base, tmp_path):
    with pytest.raises(OptionError, match="give --init_from"):
        main(replace(arguments(base, tmp_path), init_from=None))


def test_a_clip_that_cannot_be_read_is_named(tmp_path):
    clips = read_manifest(CLIPS)[:2]
    clips[1] = replace(clips[1], audio="missing.opus", shard=None)
    bank = build_feature_bank(clips, lambda _: torch.ones(4, 2), tmp_path, model="a", width=2, per_second=25)
    assert [failure.id for failure in bank.failures] == [clips[1].id]
    assert len(bank.utterances) == 1


def test_it_is_resumed(base, tmp_path, run):
    assert main(arguments(base, tmp_path / "run", steps="4", save_every="2", learning_rate="1e-3"))
    whole = checkpoint.load(tmp_path / "run" / "model", dtype=torch.float32).decoder.state_dict()
    for path in (tmp_path / "run" / "checkpoints").glob("*4*"):
        shutil.rmtree(path)
    assert main(TrainArgs(out=tmp_path / "run", resume=True, device="cpu", workers=1))
    again = checkpoint.load(tmp_path / "run" / "model", dtype=torch.float32).decoder.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
