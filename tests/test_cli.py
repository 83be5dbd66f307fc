import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
from conftest import RATE, hum
from torch import Tensor

import whisfusion
from whisfusion import checkpoint, hub
from whisfusion.averaging import averaged
from whisfusion.cli import build_parser, main
from whisfusion.cli.decoding import decoding_arguments
from whisfusion.cli.train import RECIPE_NAMES
from whisfusion.errors import OptionError
from whisfusion.train import RECIPES, TrainArgs
from whisfusion.train.prepare import Stage
from whisfusion.weights import load_whisper

HELP_SECONDS = 0.5
COMMANDS = (
    *("transcribe", "models", "pull", "info", "export", "vocabulary"),
    *("evaluate", "score", "bench", "train", "data"),
)


@pytest.fixture(autouse=True)
def _no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WHISFUSION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WHISFUSION_OFFLINE", "1")


class Call:
    """One command line: its exit status and what it printed."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *words: object) -> None:
        capfd.readouterr()
        try:
            self.status = main([str(word) for word in words])
        except SystemExit as stop:  # argparse
            self.status = stop.code
        self.out, err = capfd.readouterr()
        assert "Traceback" not in err
        # Untrained models seldom end a text, and each time a sentence says so.
        lines = err.splitlines(keepends=True)
        self.cut_off = [line for line in lines if "is cut off" in line]
        self.err = "".join(line for line in lines if "is cut off" not in line)


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., Call]:
    return lambda *words: Call(capfd, *words)


def python(*words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", code) if code else ("-m", "whisfusion")), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_help_answers_at_once_and_without_torch():
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        answer = python("--help")
        seconds.append(time.perf_counter() - started)
    assert answer.returncode == 0
    assert all(f"  {command} " in answer.stdout for command in COMMANDS)
    # The best of three: a busy machine is not our slowness.
    assert min(seconds) < HELP_SECONDS
    heavy = "{'torch', 'numpy', 'rich', 'soundfile', 'av', 'tiktoken'}"
    code = f"import sys; from whisfusion.cli import build_parser; build_parser(); print({heavy} & set(sys.modules))"
    assert python(code=code).stdout.strip() == "set()"


@pytest.mark.parametrize(
    "command", [(name,) for name in COMMANDS] + [("data", c) for c in ("check", "import", "holdout")]
)
def test_every_command_explains_itself(call, command: tuple[str, ...]):
    answer = call(*command, "--help")
    assert answer.status == 0
    assert answer.out.startswith(f"usage: whisfusion {' '.join(command)}")


def test_the_commands_in_the_readme_are_understood():
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    commands = [line for line in readme.splitlines() if line.startswith("whisfusion ")]
    assert len(commands) > 8
    for command in commands:
        arguments = build_parser().parse(shlex.split(command, comments=True)[1:])
        assert arguments.more == []


def test_without_a_command_the_help_is_shown(call):
    for words, listed in (((), "transcribe"), (("data",), "holdout")):
        answer = call(*words)
        assert answer.status == 2
        assert listed in answer.err


def test_version(call):
    assert call("--version").out == f"whisfusion {whisfusion.__version__}\n"


def test_text_goes_to_stdout_and_nothing_else(call, tiny_model: Path, make_wav):
    wav = make_wav("a.wav")
    answer = call("transcribe", wav, "--model", tiny_model, "--language", "en")
    text = whisfusion.load(tiny_model, device="cpu").transcribe(wav, language="en").text
    assert (answer.status, answer.out, answer.err) == (0, f"{text}\n", "")


def test_several_files_are_named_in_the_order_given(call, tiny_clip_model: Path, make_wav):
    files = [make_wav("b.wav", 0.5), make_wav("folder/c.flac", 2, seed=1), make_wav("folder/deep/a.ogg", 1, seed=2)]
    (files[0].parent / "folder" / "notes.txt").write_text("not sound")
    answer = call("transcribe", files[0], files[0].parent / "folder", "--model", tiny_clip_model, "--batch_size", 1)
    model = whisfusion.load(tiny_clip_model, device="cpu")
    expected = "".join(f"{file}: {model.transcribe(file).text}\n" for file in files)
    assert (answer.status, answer.out) == (0, expected)


def test_stdin(call, tiny_model: Path, make_wav, monkeypatch: pytest.MonkeyPatch):
    wav = make_wav("a.wav")
    arguments = ("--model", tiny_model, "--language", "en")
    from_file = call("transcribe", wav, *arguments).out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(wav.read_bytes())))
    assert call("transcribe", "-", *arguments).out == from_file


def test_files_are_written_by_stem(call, tiny_clip_model: Path, make_wav, tmp_path: Path):
    files = make_wav("a.wav"), make_wav("a.flac", seed=1), make_wav("b.wav", seed=2)
    out = tmp_path / "texts"
    answer = call(
        "transcribe", *files, "--model", tiny_clip_model, "--output-dir", out, "--output-format", "all", "--quiet"
    )
    assert (answer.status, answer.out, answer.err) == (0, "", "")
    kinds = ("json", "srt", "txt", "vtt")
    assert sorted(os.listdir(out)) == [f"{name}.{kind}" for name in ("a.flac", "a.wav", "b") for kind in kinds]
    value = json.loads((out / "b.json").read_text("utf-8"))
    assert (out / "b.txt").read_text("utf-8") == f"{value['text']}\n"
    assert value["language"] in ("en", "de", "ja")
    assert value["segments"][0]["candidates"]
    # Subtitles are by the times of words, which are in the JSON then too.
    words = [word for segment in value["segments"] for word in segment["words"]]
    assert "".join(word["word"] for word in words).strip() == value["text"]
    assert (out / "b.vtt").read_text("utf-8").startswith("WEBVTT\n")


@pytest.mark.parametrize("kind", ["srt", "vtt"])
def test_subtitles_of_one_file_go_to_stdout(call, tiny_model: Path, make_wav, kind: str):
    """Of a model that cannot time words too: what is said in a window is one cue."""
    model = ("--model", tiny_model, "--language", "en", "--output_format", kind)
    answer = call("transcribe", make_wav(), *model)
    assert answer.status == 0
    assert answer.out.count(" --> ") == 1
    answer = call("transcribe", make_wav(), make_wav("b.wav"), *model)
    assert answer.status == 2
    assert "say where with --output_dir" in answer.err


def test_json_on_stdout_is_a_line_for_each_file(call, tiny_model: Path, make_wav):
    files = make_wav("a.wav"), make_wav("b.wav", seed=1)
    answer = call("transcribe", *files, "--model", tiny_model, "--language", "English", "--output_format", "json")
    records = [json.loads(line) for line in answer.out.splitlines()]
    assert [record["file"] for record in records] == [str(file) for file in files]
    assert all(record["language"] == "en" and record["segments"] for record in records)


def test_a_trace_is_part_of_the_json(call, tiny_clip_model: Path, make_wav):
    words = ("transcribe", make_wav(), "--model", tiny_clip_model, "--language", "en", "--trace")
    traced = call(*words, "--output_format", "json", "-n", "3")
    assert traced.status == 0
    assert len(json.loads(traced.out)["segments"][0]["trace"]) == 3
    refused = call(*words)
    assert refused.status == 2
    assert "--output_format json" in refused.err


def test_a_text_that_filled_its_canvas_is_told(call, tiny_clip_model: Path, make_wav):
    words = ("transcribe", make_wav(), "--model", tiny_clip_model, "--language", "en", "--output_format", "json")
    answer = call(*words)
    incomplete = [segment for segment in json.loads(answer.out)["segments"] if not segment["complete"]]
    assert incomplete
    assert len(answer.cut_off) == len(incomplete)


def test_verbose_tells_more_on_stderr(call, tiny_model: Path, make_wav):
    answer = call("transcribe", make_wav("a.wav", 2.0), "--model", tiny_model, "--language", "de", "--verbose")
    assert "2.0 s, language de, confidence -" in answer.err


def test_the_whisper_system(call, tiny_whisper: Path, make_wav):
    wav = make_wav("a.wav")
    answer = call("transcribe", wav, "--system", "whisper", "--model", tiny_whisper, "--language", "en")
    text = whisfusion.load(tiny_whisper, device="cpu", system="whisper").transcribe(wav, language="en").text
    assert (answer.status, answer.out) == (0, f"{text}\n")


def chosen(*words: str) -> dict:
    return decoding_arguments(build_parser().parse(["transcribe", "a.wav", *words]))


def test_presets_and_single_options():
    rest = {"seed": 0, "batch_size": 16}
    assert chosen() == rest
    assert chosen("--fast") == {"candidates": 1, "steps": 2, "temperature": 0.0} | rest
    assert chosen("--no_proofread") == {"proofread": False} | rest
    assert chosen("--accurate", "-k", "7") == {"candidates": 7, "steps": 5} | rest
    assert chosen("--accurate", "--trajectory", "1,.5") == {"candidates": 15, "trajectory": (1.0, 0.5)} | rest
    assert (
        chosen("-n", "4", "--remask", "confidence", "--selection", "rerank", "--temperature", "0.5")
        == {
            "steps": 4,
            "remask": "confidence",
            "selection": "rerank",
            "temperature": 0.5,
        }
        | rest
    )


def test_options_of_diffusion_are_refused_for_whisper():
    with pytest.raises(OptionError, match=r"--steps, --fast: .* not with --system whisper"):
        chosen("--system", "whisper", "--fast", "-n", "3")
    with pytest.raises(OptionError, match="--no_proofread: "):
        chosen("--system", "whisper", "--no_proofread")


def encode(samples: np.ndarray, **settings: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, **settings)
    return file.getvalue()


def silent_film() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        picture = container.add_stream("mpeg4", rate=10)
        picture.width = picture.height = 64
        picture.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
        for _ in range(5):
            container.mux(picture.encode(frame))
        container.mux(picture.encode())
    return file.getvalue()


BAD_AUDIO: dict[str, tuple[str, Callable[[], bytes | None]]] = {
    "missing": ("missing.wav", lambda: None),
    "empty": ("empty.wav", lambda: b""),
    "text": ("text.wav", lambda: b"This is text that calls itself sound.\n" * 20),
    "truncated": ("cut.mp3", lambda: encode(hum(5), format="MP3")[:9000]),
    "no audio stream": ("film.mp4", silent_film),
    "zero samples": ("zero.wav", lambda: encode(np.zeros(0), format="WAV")),
    "NaN": ("nan.wav", lambda: encode(np.full(RATE, np.nan), format="WAV", subtype="FLOAT")),
}


@pytest.mark.parametrize("kind", BAD_AUDIO)
def test_a_bad_file_gets_a_sentence_and_the_others_are_done(
    call, tiny_model: Path, make_wav, tmp_path: Path, kind: str
):
    name, content = BAD_AUDIO[kind]
    if (data := content()) is not None:
        (tmp_path / name).write_bytes(data)
    good = make_wav("good.wav"), make_wav("good2.wav", seed=1)
    answer = call("transcribe", good[0], tmp_path / name, good[1], "--model", tiny_model, "--language", "en")
    assert answer.status == 1
    assert [line.split(": ")[0] for line in answer.out.splitlines()] == [str(good[0]), str(good[1])]
    (sentence,) = answer.err.splitlines()
    assert sentence.startswith(f"whisfusion: {tmp_path / name}")


def test_a_folder_without_sound_gets_a_sentence(call, tiny_model: Path, make_wav, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    answer = call("transcribe", tmp_path / "empty", make_wav(), "--model", tiny_model, "--language", "en")
    assert answer.status == 1
    assert answer.err == f"whisfusion: {tmp_path / 'empty'} is a folder without sound files\n"
    assert answer.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--language", "klingon"), "klingon"),
        (("--language", "xx"), "xx"),
        ((), "give one with --language"),
        (("--language", "sw"), "was not trained on 'sw'"),
        (
            ("--language", "en", "--trajectory", "1,0.9,0.8", "--steps", "2"),
            "a trajectory for 2 steps has 2 ratios, not 3",
        ),
        (("--language", "en", "--trajectory", "0.9,0.8"), "a trajectory starts at 1"),
        (("--language", "en", "--trajectory", "1,two"), "ratios with commas between them"),
        (("--language", "en", "--trajectory", "1,1.5"), "between 0 and 1"),
        (("--language", "en", "--candidates", "0"), "candidates (K) must be at least 1, not 0"),
        (("--language", "en", "--candidates", "many"), "invalid int value: 'many'"),
        (("--language", "en", "--steps", "9"), "9 steps need a trajectory"),
        (("--language", "en", "--temperature", "-1"), "temperature must be 0 (greedy) or more"),
        (("--language", "en", "-k", "0", "-n", "0"), "candidates (K) must be at least 1, not 0; steps (N) must be"),
        (("--language", "en", "--batch_size", "0"), "must be at least 1, not '0'"),
        (("--language", "en", "--device", "abacus"), "unknown device 'abacus'"),
        (("--language", "en", "--fast", "--accurate"), "not allowed with argument"),
        (("--language", "en", "--output_format", "all"), "say where with --output_dir"),
        (("--language", "en", "--output_format", "lrc"), "invalid choice: 'lrc'"),
        (("--language", "en", "--word_timestamps"), "is for --output_format json"),
        (("--language", "en", "--word_timestamps", "--output_format", "json"), "leave out word_timestamps"),
        (("--language", "en", "--trace", "--output_format", "srt"), "--trace is for"),
        (("--language", "en", "--colour"), "unknown: --colour"),
    ],
)
def test_bad_options_get_a_sentence_and_nothing_is_done(call, tiny_model: Path, make_wav, words, said: str):
    answer = call("transcribe", make_wav(), "--model", tiny_model, *words)
    assert answer.status == 2
    assert answer.out == ""
    assert said in answer.err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "encoder.safetensors").unlink(), "encoder.safetensors is missing"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "generation_config.json").unlink(), "generation_config.json is missing"),
        (lambda folder: _flip_a_byte(folder / "model.safetensors"), "sha256 differs"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        (shutil.rmtree, "there is no model and no folder"),
    ],
)
def test_a_damaged_model_folder_gets_a_sentence(call, tiny_model: Path, make_wav, tmp_path: Path, damage, said: str):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    damage(folder)
    answer = call("transcribe", make_wav(), "--model", folder, "--language", "en")
    assert (answer.status, answer.out) == (1, "")
    (sentence,) = answer.err.splitlines()
    assert said in sentence


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_an_interrupt_and_a_closed_pipe_are_no_errors(
    call, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, make_wav
):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("whisfusion.cli.transcribe.load_transcriber", interrupt)
    answer = call("transcribe", make_wav())
    assert (answer.status, answer.err) == (130, "whisfusion: stopped\n")
    reader = subprocess.Popen(
        [sys.executable, "-m", "whisfusion", "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert reader.stdout
    assert reader.stderr
    reader.stdout.close()
    assert reader.wait(60) == 141
    assert reader.stderr.read() == b""
    reader.stderr.close()


def test_out_of_memory_and_a_missing_package_get_a_sentence(call, monkeypatch: pytest.MonkeyPatch, make_wav):
    import torch

    def fail(error: Exception) -> None:
        def load(_: object) -> None:
            raise error

        monkeypatch.setattr("whisfusion.cli.transcribe.load_transcriber", load)

    fail(torch.OutOfMemoryError("CUDA out of memory"))
    answer = call("transcribe", make_wav())
    assert answer.status == 1
    assert "--batch_size" in answer.err
    fail(ModuleNotFoundError("No module named 'soxr'", name="soxr"))
    assert "pip install soxr" in call("transcribe", make_wav()).err
    fail(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        call("transcribe", make_wav())


def test_evaluate_then_score(call, tiny_clip_model: Path, make_manifest, tmp_path: Path):
    data = make_manifest("english", [0.5, 1.5, 1.0]), make_manifest("japanese", [0.7], "ja", "こんにちは")
    out = tmp_path / "h.jsonl"
    arguments = ("evaluate", tiny_clip_model, "--data", *data, "--out", out, "--candidates", 2)
    answer = call(*arguments, "--limit", 2)
    assert answer.status == 0
    assert "2 utterances" in answer.out
    assert call("score", out, "--data", *data).status == 1
    assert call(*arguments).status == 2
    assert "(2 were there already, 0 not decoded)" in call(*arguments, "--resume").out
    facts = json.loads((tmp_path / "h.run.json").read_text("utf-8"))["settings"]
    assert facts["model"]["sha256"].keys() == {"model.safetensors", "encoder.safetensors"}

    answer = call("score", out, "--data", *data, "--json", tmp_path / "new" / "score.json")
    assert answer.status == 0
    last = json.loads(answer.out.splitlines()[-1])
    assert last == json.loads((tmp_path / "new" / "score.json").read_text("utf-8"))
    assert [(s["dataset"], s["measure"]) for s in last["scores"]] == [("english", "wer"), ("japanese", "cer")]
    assert "oracle %" in answer.out


def test_evaluate_tells_of_failures(call, tiny_clip_model: Path, make_manifest, tmp_path: Path):
    data = make_manifest("english", [0.5, 1.5])
    (tmp_path / "english-1.wav").unlink()
    answer = call("evaluate", tiny_clip_model, "--data", data, "--out", tmp_path / "h.jsonl")
    assert answer.status == 1
    assert "1 not decoded" in answer.out


def test_evaluate_whisper(call, tiny_whisper: Path, make_manifest, tmp_path: Path):
    data, out = make_manifest("english", [0.5]), tmp_path / "h.jsonl"
    assert call("evaluate", tiny_whisper, "--system", "whisper", "--data", data, "--out", out).status == 0
    assert "candidates" not in json.loads(out.read_text("utf-8"))
    assert json.loads((tmp_path / "h.run.json").read_text("utf-8"))["settings"]["model"]["system"] == "whisper"


def test_a_bad_manifest_gets_a_sentence(call, tiny_model: Path, tmp_path: Path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{]\n")
    answer = call("evaluate", tiny_model, "--data", bad, "--out", tmp_path / "h.jsonl")
    assert answer.status == 1
    assert "line 1: not JSON" in answer.err


def test_models_lists_names_and_pull_names_them(call):
    answer = call("models")
    assert answer.status == 0
    assert "whisper-base" in answer.out
    refused = call("pull", "whisper-bose")
    assert (refused.status, refused.out) == (1, "")
    assert "whisper-base" in refused.err


def test_pull_offline_fetches_nothing(call):
    answer = call("pull", "whisper-base", "--offline")
    assert answer.status == 1
    assert "offline" in answer.err


def test_info(call, tiny_model: Path, tiny_whisper: Path, tmp_path: Path):
    here = call("info").out
    for part in ("whisfusion", "torch", "device cpu", "threads", str(tmp_path / "cache"), "MIT"):
        assert part in here
    ours = call("info", tiny_model).out
    assert "decoder parameters" in ours
    assert "en, ja, de" in ours
    assert json.loads((tiny_model / "config.json").read_text())["files"]["model.safetensors"] in ours
    assert "system              whisper\n" in call("info", tiny_whisper).out
    assert call("info", tmp_path / "nowhere").status == 1


def test_export_hands_on_a_model_that_needs_nothing_else(call, tiny_model: Path, tmp_path: Path):
    out = tmp_path / "handed_on"
    answer = call(
        *("export", tiny_model, "--out", out, "--int8", "--encoder", "--file_mib", "0.05", "--experimental", "ja,de"),
        *("--trajectory", "1,0.5", "--temperature", "0"),
    )
    assert answer.status == 0, answer.err
    assert len(list(out.glob("encoder*.safetensors"))) > 1
    assert sum(file.stat().st_size for file in out.iterdir()) < sum(f.stat().st_size for f in tiny_model.iterdir())
    assert json.loads((out / "generation_config.json").read_text())["steps"] == 2
    told = call("info", out).out
    assert re.search(r"experimental languages +ja, de\n", told)
    assert not re.search(r"^languages.*ja", told, re.MULTILINE)
    assert call("export", tiny_model, "--out", out, "--experimental", "xx").status == 2


def test_export_hands_on_whispers_decoder_too(
    call, tiny_clip_model: Path, tiny_whisper, make_wav, monkeypatch, tmp_path
):
    model, out, again = tmp_path / "model", tmp_path / "handed_on", tmp_path / "again"
    shutil.copytree(tiny_clip_model, model)
    answer = call("export", model, "--out", out, "--whisper", "--encoder")
    assert answer.status == 1
    assert "whisfusion pull whisper-base" in answer.err
    resolve = hub.resolve
    monkeypatch.setattr(hub, "resolve", lambda name: tiny_whisper if name == "whisper-base" else resolve(name))
    text = tmp_path / "text.txt"
    text.write_text("Good morning, everyone.\n", encoding="utf-8")
    spoken = [word for code in ("en", "de", "ja") for word in ("--text", f"{code}={text}")]
    assert call("vocabulary", model, *spoken).status == 0
    answer = call("export", model, "--out", out, "--whisper", "--encoder", "--int8", "--bits", "6", "--drop_unused")
    assert answer.status == 0, answer.err
    told = call("info", out).out
    assert re.search(r"whisper layers +1\n", told)
    assert "sha256 whisper.safetensors" in told
    before, after = load_whisper(tiny_whisper).decoder, checkpoint.load(out, dtype=torch.float32).whisper
    weight, same = (whisper.blocks[0].ffn.up.weight for whisper in (before, after))
    step = weight.abs().amax(1, keepdim=True) / 31
    assert ((same - weight).abs() <= 0.5001 * step).all()
    # From now on no other Whisper is needed, and what has its decoder hands it on.
    monkeypatch.setattr(hub, "resolve", resolve)
    assert call("transcribe", make_wav("a.wav"), "--model", out).status == 0
    assert call("export", out, "--out", again, "--encoder", "--int8", "--bits", "6").status == 0
    assert checkpoint.load(again, dtype=torch.float32).config.whisper == after.config
    assert call("export", out, "--out", again, "--bits", "9").status == 2


def test_export_averages_two_runs(call, tiny_model: Path, tmp_path: Path):
    def decoder_of(folder: Path) -> dict[str, Tensor]:
        return checkpoint.load(folder, dtype=torch.float32).decoder.state_dict()

    model = checkpoint.load(tiny_model, dtype=torch.float32)
    own = decoder_of(tiny_model)
    torch.manual_seed(0)
    noisy = {name: value + 0.01 * torch.randn_like(value) for name, value in own.items()}
    other, out = tmp_path / "other", tmp_path / "mean"
    checkpoint.save(other, model.config, noisy, encoder=model.encoder.state_dict(), dtype=torch.float32)
    answer = call("export", tiny_model, "--out", out, "--encoder", "--average", other, "--share", "0.25")
    assert answer.status == 0, answer.err
    for name, value in decoder_of(out).items():
        torch.testing.assert_close(value, 0.75 * own[name] + 0.25 * noisy[name], atol=1e-3, rtol=1e-2)
    assert "share_of_another_run" in call("info", out).out
    answer = call("export", tiny_model, "--out", out, "--average", other, "--share", "2")
    assert answer.status == 2
    assert "between 0 and 1, not 2" in answer.err


def test_weights_of_another_model_are_not_averaged():
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    assert averaged(state, {"a": torch.zeros(2)}, 0.5)["a"].tolist() == [0.5, 0.5]
    assert averaged(state, {"a": torch.zeros(2)}, 0.5)["b"] is state["b"]
    with pytest.raises(OptionError, match=r"b has shape \(4,\) in the other model, not \(3,\)"):
        averaged(state, {"b": torch.ones(4)}, 0.5)
    with pytest.raises(OptionError, match="no weight in common"):
        averaged(state, {}, 0.5)


def test_data_commands(call, make_manifest, tmp_path: Path):
    data = make_manifest("english", [1.5, 2.0, 2.5])
    answer = call("data", "check", data, "--allow", "duplicate-audio", "repeated-sentence")
    assert "3 utterances" in answer.out
    assert answer.status == 0
    assert call("data", "check", data, "--against", data).status == 1
    answer = call("data", "import", data, tmp_path / "imported.jsonl", "--dataset", "mine")
    assert answer.status == 0
    assert '"dataset": "mine"' in (tmp_path / "imported.jsonl").read_text("utf-8")
    answer = call("data", "holdout", data, "--out", tmp_path / "held.jsonl", "--count", 2)
    assert answer.status == 0
    assert len((tmp_path / "held.blacklist.txt").read_text("utf-8").splitlines()) == 2
    assert call("data", "holdout", data, "--out", tmp_path / "held.jsonl", "--count", 9).status == 1


def test_train_takes_every_field_of_the_recipe(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[TrainArgs] = []
    monkeypatch.setattr("whisfusion.train.launch.main", asked.append)
    answer = call(
        *("train", "--recipe", "tiny", "--data", "a", "b", "--learning-rate", "3e-4", "--out", tmp_path, "--dry-run"),
        *("--decoder.layers=6", "--random_encoder", "none", "--dev", "c", "--filters.blacklist", "x,y"),
    )
    assert answer.status == 0
    settings = {"learning_rate": "3e-4", "decoder.layers": "6", "random_encoder": "none", "filters.blacklist": "x,y"}
    assert asked == [TrainArgs("tiny", ("a", "b"), ("c",), tmp_path, settings, dry_run=True)]


def test_train_takes_stages_with_options_of_their_own(call, monkeypatch: pytest.MonkeyPatch):
    asked: list[TrainArgs] = []
    monkeypatch.setattr("whisfusion.train.launch.main", asked.append)
    stages = ("--then", "base_stage1 --learning-rate 1e-4 --minutes=2", "--then", "base_stage2")
    answer = call("train", "--recipe", "base_hearing", *stages, "--steps", "9", "--data", "a")
    assert answer.status == 0
    then = (Stage("base_stage1", {"learning_rate": "1e-4", "minutes": "2"}), Stage("base_stage2"))
    assert asked == [TrainArgs("base_hearing", ("a",), settings={"steps": "9"}, then=then)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--then", ""), "must be a recipe and its options"),
        (("--then", "tiny 'a"), "must be a recipe and its options"),
        (("--then= --steps 3",), "must begin with the name of a recipe"),
        (("--then", "tiny --steps"), "--steps has no value"),
        (("--steps",), "--steps has no value"),
        (("--steps", "--epochs", "3"), "--steps has no value"),
        (("--steps=3", "4"), "'4' does not belong to an option"),
        (("--settings", "--lerning_rate", "3"), "did you mean 'learning_rate'"),
        (("--settings", "--recipe", "cake"), "there is no recipe 'cake'"),
    ],
)
def test_bad_settings_get_a_sentence(call, words: tuple[str, ...], said: str):
    answer = call("train", *words)
    assert answer.status == 2
    assert said in answer.err


def test_train_lists_its_recipes_and_their_settings(call):
    assert set(RECIPE_NAMES) == set(RECIPES)
    answer = call("train", "--settings", "--recipe", "tiny", "--steps", 700)
    assert "--decoder.layers 2\n" in answer.out
    assert "--steps 700\n" in answer.out


def test_train_then_transcribe(call, tmp_path: Path, make_wav):
    data = Path(__file__).parent / "data" / "tiny"
    small = ("--steps", 2, "--decoder.layers", 1, "--sampler.utterances", 4, "--warmup_steps", 1, "--save_every", 2)
    trained = call("train", "--recipe", "tiny", "--data", data, "--out", tmp_path / "run", "--device", "cpu", *small)
    assert trained.status == 0
    answer = call("transcribe", make_wav(), "--model", tmp_path / "run" / "model", "--language", "en")
    assert (answer.status, answer.err) == (0, "")
