"""A model folder: config.json, generation_config.json and safetensors. Strict, hashed, and never a pickle.

`config.json` holds the architecture, what the encoder is and the sha256 of every weight file; loading checks them all.
"""

import dataclasses
import hashlib
import json
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from whisfusion.decoder import Canvas, DecoderConfig, DiffusionDecoder
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.errors import ModelError, OptionError
from whisfusion.pdd import PDDOptions
from whisfusion.quantise import dequantise, is_quantised, quantise
from whisfusion.skeleton import skeleton
from whisfusion.tokenizer import ENDOFTEXT, LANGUAGES, PAPER_LANGUAGES
from whisfusion.vocabulary import Vocabulary
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig

FORMAT = 1
"""Raised when an older folder would be read wrongly."""

_FILE_BYTES = 4 << 30
_BY_TOKEN = ("embed.weight", "head.weight")
"""Matrices of a decoder that have a row for each token."""
_TOKENS = "tokens"
"""The name under which the rows that are stored are listed, where that is not all of them."""
_VOCABULARY = "vocabulary.safetensors"
_STEMS = ("model*", "encoder*", "whisper*", "vocabulary")
"""What the files of a folder are called."""


@dataclass(frozen=True)
class ModelConfig:
    """What a model is: everything but its weights."""

    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    encoder_name: str = "whisper-large-v3"
    """The Whisper whose encoder this is, as `whisfusion pull` knows it: read when the folder holds no encoder."""
    encoder_sha256: str | None = None
    """`weights.fingerprint` of that encoder where it is not in the folder."""
    window: Literal["padded", "clip"] = "padded"
    """Whether the encoder hears clips padded to 30 s (the paper) or their own duration."""
    text_style: Literal["normalised", "written"] = "normalised"
    """Lower case without punctuation (the paper), or sentences."""
    languages: tuple[str, ...] = PAPER_LANGUAGES
    experimental: tuple[str, ...] = ()
    """Those of them that are too often misheard, or were never measured."""
    detects_language: bool = False
    """Whether it was trained with masked language tokens."""
    whisper: WhisperDecoderConfig | None = None
    """Shape of the decoder of the Whisper whose encoder this is, where the folder has it: to proofread, to rerank and
    to tell the language."""
    training: dict[str, Any] = field(default_factory=dict)
    """Facts about the training: recipe, steps, data."""

    def __post_init__(self) -> None:
        problems = []
        if self.decoder.audio_width != self.encoder.width:
            problems.append(
                f"decoder audio_width {self.decoder.audio_width} is not the encoder's width {self.encoder.width}"
            )
        if not isinstance(self.languages, tuple) or not self.languages or set(self.languages) - set(LANGUAGES):
            problems.append(f"languages must be codes that Whisper knows, at least one, not {self.languages!r}")
        if odd := sorted(set(self.experimental) - set(self.languages)):
            problems.append(f"experimental languages must be among the model's own, unlike {', '.join(odd)}")
        if self.window not in ("padded", "clip"):
            problems.append(f"window must be 'padded' or 'clip', not {self.window!r}")
        if self.text_style not in ("normalised", "written"):
            problems.append(f"text_style must be 'normalised' or 'written', not {self.text_style!r}")
        if self.whisper is not None and self.whisper.width != self.encoder.width:
            problems.append(f"whisper width {self.whisper.width} is not the encoder's width {self.encoder.width}")
        OptionError.collect(problems)

    @property
    def tells_language(self) -> bool:
        """Whether the language of speech can be found out."""
        return self.detects_language or self.whisper is not None


@dataclass(frozen=True)
class Model:
    """A loaded model folder."""

    config: ModelConfig
    decoder: DiffusionDecoder
    encoder: WhisperEncoder
    generation: PDDOptions
    vocabulary: Vocabulary | None = None
    """The tokens that may be written in each language; None where that is every token."""
    stored_int8: bool = False
    """Whether its matrices were kept as int8; they are floats here."""
    whisper: WhisperDecoder | None = None
    """The decoder of the Whisper whose encoder it has; of tokens that the vocabulary lacks it knows nothing."""


def save(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    decoder: Mapping[str, Tensor],
    *,
    encoder: Mapping[str, Tensor] | None = None,
    whisper: Mapping[str, Tensor] | None = None,
    generation: PDDOptions | None = None,
    dtype: torch.dtype = torch.bfloat16,
    int8: bool = False,
    bits: int = 8,
    tokens: Tensor | None = None,
    file_bytes: int = _FILE_BYTES,
) -> Path:
    """Write a model folder from state dicts, replacing the files of one that is there.

    Floats are stored as `dtype`, in files of at most `file_bytes` where no single tensor is larger; with `int8`,
    matrices as whole numbers and one scale per row: of so many `bits`, but for the encoder, which hears for all the
    rest. Without `encoder` the folder names the Whisper to take it from. `whisper` is the state of that one's decoder,
    whose shape is the config's. Of `tokens` alone, where they are given, embeddings are stored: for a model whose
    vocabulary has no others. A vocabulary comes with `add`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stem in _STEMS:
        for stale in folder.glob(f"{stem}.safetensors"):
            stale.unlink()
    files: dict[str, str] = {}
    if (whisper is None) != (config.whisper is None):
        raise OptionError("a config that describes Whisper's decoder goes with its weights")
    if tokens is not None:
        decoder = _only(decoder, tokens)
        if whisper is not None and config.whisper is not None:
            # From endoftext on, ids differ between sizes: those of prompts are all kept.
            own = torch.arange(ENDOFTEXT, config.whisper.vocab_size)
            whisper = _only(whisper, torch.cat([tokens[tokens < ENDOFTEXT], own]))
    for stem, state in (("model", decoder), ("encoder", encoder or {}), ("whisper", whisper or {})):
        stored = {
            name: (value.to(dtype) if value.is_floating_point() else value).detach().cpu().contiguous()
            for name, value in state.items()
        }
        if int8:
            stored = quantise(state, dtype, bits=8 if stem == "encoder" else bits)
        parts = list(_parts(stored, file_bytes))
        for number, part in enumerate(parts, 1):
            name = f"{stem}.safetensors" if len(parts) == 1 else f"{stem}-{number:05}-of-{len(parts):05}.safetensors"
            files[name] = _write_tensors(folder / name, part)
    # The config goes last: a folder without one is not a model, so that a write cut short is not taken for one.
    _write_json(folder / "generation_config.json", dataclasses.asdict(generation or PDDOptions()))
    _write_json(folder / "config.json", _described(config, files))
    return folder


def add(folder: str | os.PathLike[str], vocabulary: Vocabulary) -> None:
    """Put a vocabulary into a model folder, in place of what it had.

    Raises ModelError where it is no model folder, OptionError where the model does not know one of the languages.
    """
    folder = Path(folder)
    config, files = read_config(folder)
    foreign = sorted(set(vocabulary) - set(config.languages))
    OptionError.collect([f"the model does not know {code!r}, only {', '.join(config.languages)}" for code in foreign])
    files[_VOCABULARY] = _write_tensors(folder / _VOCABULARY, vocabulary.pack())
    _write_json(folder / "config.json", _described(config, files))


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a file of weights; returns its sha256."""
    from safetensors.torch import save_file

    save_file(tensors, path)
    # safetensors lets nobody but the owner read it.
    path.chmod(path.parent.stat().st_mode & 0o666)
    return sha256_of(path)


def _described(config: ModelConfig, files: Mapping[str, str]) -> dict[str, Any]:
    described = {"format": FORMAT, **dataclasses.asdict(config), "files": dict(files)}
    if config.whisper is None:
        del described["whisper"]
    return described


def load(folder: str | os.PathLike[str], *, device: str | torch.device = "cpu", dtype: torch.dtype) -> Model:
    """Read a model folder; ModelError says what is missing, altered or unknown in it."""
    folder = Path(folder)
    config, files = read_config(folder)
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{folder} is incomplete: {name} is missing. Copy or pull the model again")
        if sha256_of(path) != expected:
            raise ModelError(
                f"{path} is not the file that config.json describes (sha256 differs). Pull the model again"
            )
    with skeleton():
        decoder = DiffusionDecoder(config.decoder)
        encoder = WhisperEncoder(config.encoder)
    stored = _tensors(folder, "model", files)
    _fill(decoder, _all_tokens(dequantise(stored), config.decoder.vocab_size), folder, device, dtype)
    has_encoder = any(name.startswith("encoder") for name in files)
    encoder_state = dequantise(_tensors(folder, "encoder", files)) if has_encoder else _published_encoder(config)
    _fill(encoder, encoder_state, folder, device, dtype)
    decoder.requires_grad_(False).eval()
    generation = _parse(PDDOptions, _read_json(folder / "generation_config.json"), folder / "generation_config.json")
    packed = _tensors(folder, "vocabulary", files)
    vocabulary = Vocabulary.unpack(packed) if packed else None
    whisper = None
    if config.whisper is not None:
        with skeleton():
            whisper = WhisperDecoder(config.whisper)
        whisper_state = _all_tokens(dequantise(_tensors(folder, "whisper", files)), config.whisper.vocab_size)
        _fill(whisper, whisper_state, folder, device, dtype)
    return Model(config, decoder, encoder, generation, vocabulary, is_quantised(stored), whisper)


def read_config(folder: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, str]]:
    """The config of a model folder, and its weight files with their hashes."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    raw = _read_json(path)
    found = raw.pop("format", None)
    if found is None:
        raise ModelError(
            f"{folder} is not a model folder of whisfusion; a Whisper folder is used with --system whisper"
        )
    if found != FORMAT:
        raise ModelError(
            f"{path} has format {found!r}, this version of whisfusion reads format {FORMAT}: "
            "upgrade whisfusion, or pull the model again"
        )
    # Folders of 0.1 may have one, of which nothing is read any more.
    raw.pop("detector", None)
    files = raw.pop("files", None)
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{path} lists no weight files: pull the model again")
    odd = [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]
    if odd:
        raise ModelError(f"{path} lists files that are not safetensors in this folder: {', '.join(odd)}")
    return _parse(ModelConfig, raw, path), files


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Hex sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _only(state: Mapping[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """A decoder's state with what it knows of some tokens alone, and which these are."""
    own = {name: state[name][tokens] for name in _BY_TOKEN if name in state}
    return {**state, **own, _TOKENS: tokens.to(torch.int32)}


def _all_tokens(state: Mapping[str, Tensor], vocabulary: int) -> dict[str, Tensor]:
    """What `_only` was given; a token of which nothing was kept is as the others are on average."""
    state = dict(state)
    tokens = state.pop(_TOKENS, None)
    if tokens is not None:
        for name in _BY_TOKEN:
            if name in state:
                own_ND = state[name].float()
                state[name] = own_ND.mean(0).repeat(vocabulary, 1).index_copy(0, tokens.long(), own_ND)
    return state


def _published_encoder(config: ModelConfig) -> Mapping[str, Tensor]:
    from whisfusion.weights import fingerprint, load_whisper_weights

    weights = load_whisper_weights(config.encoder_name)
    found = fingerprint(weights.encoder)
    if config.encoder_sha256 and found != config.encoder_sha256:
        raise ModelError(
            f"the weights of {config.encoder_name} on this machine are not those the model was trained with "
            f"(sha256 {found[:12]}, expected {config.encoder_sha256[:12]})"
        )
    return weights.encoder


def _fill(
    module: torch.nn.Module,
    state: Mapping[str, Tensor],
    folder: Path,
    device: str | torch.device,
    dtype: torch.dtype,
) -> None:
    """Give a module on the meta device its weights; every tensor must be there and fit."""
    own = module.state_dict()
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in own]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ModelError(f"the weights in {folder} do not fit its config: {'; '.join(problems[:5])}{more}")
    module.load_state_dict(
        {name: value.to(device=device, dtype=dtype) for name, value in state.items()},
        strict=True,
        assign=True,
    )


def _tensors(folder: Path, stem: str, files: Mapping[str, str]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for name in sorted(files):
        if name.startswith(stem):
            state |= load_file(folder / name)
    return state


def _parts(state: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in state.items():
        if part and size + value.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = value
        size += value.nbytes
    if part:
        yield part


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is incomplete: {path.name} is missing. Pull the model again") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


_Options = typing.TypeVar("_Options")


def _parse(kind: type[_Options], raw: Mapping[str, Any], path: Path) -> _Options:
    """A dataclass from JSON: nested dataclasses and tuples restored, unknown names refused."""
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not usable: {raw!r} stands where settings should be")
    known = {f.name: f.type for f in dataclasses.fields(typing.cast(Any, kind))}
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise ModelError(f"{path} has settings that this version of whisfusion does not know: {', '.join(unknown)}")
    nested = {
        "decoder": DecoderConfig,
        "encoder": EncoderConfig,
        "canvas": Canvas,
        "whisper": WhisperDecoderConfig,
    }
    values = {
        name: _parse(nested[name], value, path)
        if name in nested
        else tuple(value)
        if isinstance(value, list)
        else value
        for name, value in raw.items()
    }
    try:
        return kind(**values)
    except (TypeError, OptionError) as error:
        raise ModelError(f"{path} is not usable: {error}") from None
