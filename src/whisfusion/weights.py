"""Published Whisper weights, in whatever format they come, under the names of our modules.

Three formats, told apart by their files: a Hugging Face folder (or hub id), OpenAI's `.pt`, a CTranslate2
folder. Each gives tensors under its own names; a table renames them; one strict check compares the result
with the modules themselves. Sizes come from the shapes, so any Whisper from tiny to large-v3 and turbo loads
without a config file.
"""

import hashlib
import json
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whisfusion import hub
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.errors import ModelError
from whisfusion.skeleton import skeleton
from whisfusion.tokenizer import ENDOFTEXT, whisper_id
from whisfusion.whisper import Whisper, WhisperDecoder, WhisperDecoderConfig

HEAD_WIDTH = 64  # of every published Whisper
_SHOWN = 12  # problems spelt out in one error

_HUGGING_FACE = {
    "layers": "blocks",
    "self_attn_layer_norm": "self_norm",
    "encoder_attn": "cross_attn",
    "encoder_attn_layer_norm": "cross_norm",
    "final_layer_norm": "ffn_norm",
    "layer_norm": "norm",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "out_proj": "out",
    "fc1": "ffn.up",
    "fc2": "ffn.down",
    "embed_tokens": "embed",
    "embed_positions.weight": "positions",
    "model.encoder": "encoder",
    "model.decoder": "decoder",
}
_OPENAI = {
    "attn": "self_attn",
    "attn_ln": "self_norm",
    "cross_attn_ln": "cross_norm",
    "mlp.0": "ffn.up",
    "mlp.2": "ffn.down",
    "mlp_ln": "ffn_norm",
    "query": "q",
    "key": "k",
    "value": "v",
    "ln": "norm",
    "ln_post": "norm",
    "token_embedding": "embed",
    "positional_embedding": "positions",
}
_CTRANSLATE2 = {
    "self_attention.layer_norm": "self_norm",
    "self_attention.linear_0": "self_attn.q+k+v",
    "self_attention.linear_1": "self_attn.out",
    "attention.layer_norm": "cross_norm",
    "attention.linear_0": "cross_attn.q",
    "attention.linear_1": "cross_attn.k+v",
    "attention.linear_2": "cross_attn.out",
    "ffn.layer_norm": "ffn_norm",
    "ffn.linear_0": "ffn.up",
    "ffn.linear_1": "ffn.down",
    "layer_norm": "norm",
    "gamma": "weight",
    "beta": "bias",
    "embeddings": "embed",
    "position_encodings.encodings": "positions",
}
# In the order of CTranslate2's type ids.
_CTRANSLATE2_DTYPES = (
    torch.float32,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
)


@dataclass(frozen=True)
class WhisperWeights:
    """State dicts for WhisperEncoder and WhisperDecoder, in the dtype of the file, and the shapes they imply.

    `sha256` is of the weight file; where there are several, of their digests joined in the order of their
    names.
    """

    encoder: dict[str, Tensor]
    decoder: dict[str, Tensor]
    encoder_config: EncoderConfig
    decoder_config: WhisperDecoderConfig
    sha256: str


def load_whisper(
    path_or_id: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Whisper:
    """Encoder and decoder of a published Whisper, ready to run; see `load_whisper_weights`."""
    weights = load_whisper_weights(path_or_id)
    with skeleton():
        encoder, decoder = WhisperEncoder(weights.encoder_config), WhisperDecoder(weights.decoder_config)
    for module, state in ((encoder, weights.encoder), (decoder, weights.decoder)):
        module.load_state_dict({name: x.to(device, dtype) for name, x in state.items()}, assign=True)
    return Whisper(encoder, decoder, weights.sha256)


def load_whisper_weights(path_or_id: str | Path) -> WhisperWeights:
    """Read a Hugging Face or CTranslate2 folder, an OpenAI `.pt`, or a name or hub id known to `hub.resolve`.

    Raises ModelError where a tensor is missing, unexpected or of the wrong shape (naming all of them), where
    a file is not what was pulled, and for English-only models, whose token ids are others; DownloadError
    where a hub id cannot be fetched.
    """
    path = hub.resolve(path_or_id)
    files = _weight_files(path)
    digests = {file.name: hub.file_sha256(file) for file in files}
    hub.check_digests(files[0].parent, digests)
    try:
        if files[0].suffix == ".pt":
            named = _rename(_read_openai(files[0]), _OPENAI)
        elif files[0].name == "model.bin":
            named = _split_fused(_rename(_read_ctranslate2(files[0]), _CTRANSLATE2))
        else:
            named = _rename(_read_safetensors(files), _HUGGING_FACE)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    sha256 = "".join(digests.values())
    if len(digests) > 1:
        sha256 = hashlib.sha256(sha256.encode()).hexdigest()
    return _checked(path, named, sha256)


def _weight_files(path: Path) -> list[Path]:
    """The weight files of a model, in the order of their names."""
    if path.is_file():
        if path.suffix != ".pt":
            raise ModelError(
                f"{path} is no Whisper checkpoint: give OpenAI's .pt, or a folder with model.safetensors or model.bin"
            )
        return [path]
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if index.is_file():
        try:
            files = [path / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of safetensors files; fetch the model again") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            raise ModelError(f"{path} lacks {', '.join(missing) or 'every file'} of its index; fetch the model again")
        return files
    if (path / "model.bin").is_file():
        return [path / "model.bin"]
    raise ModelError(
        f"{path} holds no Whisper weights: expected model.safetensors (Hugging Face) or model.bin (CTranslate2)"
    )


def _rename(tensors: Mapping[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    """Replace whole dotted parts of names by `table`, longer keys first; what it does not know stays."""
    keys = "|".join(map(re.escape, sorted(table, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![^.])(?:{keys})(?![^.])")
    return {pattern.sub(lambda found: table[found[0]], name): x for name, x in tensors.items()}


def _read_safetensors(files: list[Path]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file.name} is damaged ({error}); fetch the model again") from error
    return _untied(tensors, head="proj_out.weight", embedding="model.decoder.embed_tokens.weight")


def _read_openai(file: Path) -> dict[str, Tensor]:
    try:
        checkpoint: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load answers a foreign file with many kinds of error
        raise ModelError(f"{file.name} is not a checkpoint of plain tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(checkpoint, dict) or not {"dims", "model_state_dict"} <= checkpoint.keys():
        raise ModelError(f"{file.name} has no 'dims' and 'model_state_dict', so it is not OpenAI's Whisper")
    state = checkpoint["model_state_dict"]
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) for x in state.values()):
        raise ModelError(f"{file.name}: 'model_state_dict' is not a dictionary of tensors")
    return state


def _read_ctranslate2(file: Path) -> dict[str, Tensor]:
    """The tensors of a CTranslate2 `model.bin` under dotted names; quantised ones become float32."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            variables, aliases = _parse_ctranslate2(data)
    except (struct.error, UnicodeDecodeError, IndexError, ValueError, RuntimeError) as error:
        raise ModelError(f"model.bin is damaged or not of CTranslate2 ({error}); fetch the model again") from error
    tensors: dict[str, Tensor] = {}
    for name, x in variables.items():
        scale = variables.get(f"{name}_scale")
        if scale is not None:
            # Stored is round(x * scale): one scale for the tensor, or one for each row.
            x = x.float() / scale.float().reshape(-1, *[1] * (x.dim() - 1))
        # A scalar is a setting, such as the number of heads: the shapes say the same.
        if x.dim() and not name.endswith("_scale"):
            tensors[name] = x
    for alias, target in aliases.items():
        if target not in variables:
            raise ModelError(f"model.bin gives {alias} as another name of {target}, which it does not hold")
        if target in tensors:
            tensors[alias] = tensors[target].clone()
    tensors = {re.sub(r"\blayer_(\d+)", r"blocks.\1", name.replace("/", ".")): x for name, x in tensors.items()}
    return _untied(tensors, head="decoder.projection.weight", embedding="decoder.embeddings.weight")


def _parse_ctranslate2(data: mmap.mmap) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Variables and aliases (alias to variable) of a little-endian file of format 4 to 6."""
    place = 0

    def number(code: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{code}", data, place)
        place += struct.calcsize(f"<{code}")
        return value

    def chunk(size: int) -> bytes:
        nonlocal place
        if place + size > len(data):
            raise ValueError(f"it ends at byte {len(data)}, {place + size - len(data)} too early")
        place += size
        return data[place - size : place]

    def string() -> str:
        return str(chunk(number("H"))[:-1], "utf-8")  # the length counts a final zero byte

    version = number("I")
    if not 4 <= version <= 6:
        raise ValueError(f"format version {version}, where 4 to 6 are known")
    kind = string()
    if kind != "WhisperSpec":
        raise ValueError(f"it holds a {kind}, where a WhisperSpec is needed")
    number("I")  # revision of the spec: 3 since the first release
    variables: dict[str, Tensor] = {}
    for _ in range(number("I")):
        name = string()
        shape = [number("I") for _ in range(number("B"))]
        dtype = _CTRANSLATE2_DTYPES[number("B")]
        raw = bytearray(chunk(number("I")))
        variables[name] = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    aliases = {string(): string() for _ in range(number("I"))}
    return variables, aliases


def _untied(tensors: dict[str, Tensor], *, head: str, embedding: str) -> dict[str, Tensor]:
    """Drop a stored output head, which every Whisper ties to its token embedding."""
    if head in tensors and not (embedding in tensors and torch.equal(tensors[head], tensors[embedding])):
        raise ModelError(f"{head} differs from {embedding}; a Whisper has one matrix for both")
    return {name: x for name, x in tensors.items() if name != head}


def _split_fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut `q+k+v` and `k+v` into their parts, and drop the key biases, which must be zeros."""
    parts: dict[str, Tensor] = {}
    for name, x in tensors.items():
        fused = next((part for part in name.split(".") if "+" in part), None)
        if fused is None:
            parts[name] = x
            continue
        letters = fused.split("+")
        if len(x) % len(letters):
            raise ModelError(f"{name} has {len(x)} rows, which {len(letters)} projections cannot share")
        for letter, part in zip(letters, x.chunk(len(letters)), strict=True):
            parts[name.replace(fused, letter)] = part.clone()  # a memory of its own, so that it can be saved
    for name in [name for name in parts if name.endswith(".k.bias")]:
        if parts.pop(name).any():
            raise ModelError(f"{name} is not zero; Whisper's keys have no bias")
    return parts


def _checked(path: Path, named: dict[str, Tensor], sha256: str) -> WhisperWeights:
    """Read the sizes, and compare every name and shape with those of the modules."""
    sizing = {
        "encoder.conv1.weight": 3,
        "encoder.positions": 2,
        "decoder.embed.weight": 2,
        "decoder.positions": 2,
    }
    missing = [name for name, rank in sizing.items() if name not in named or named[name].dim() != rank]
    missing += [f"{side}.blocks.0" for side in ("encoder", "decoder") if not _layers(named, side)]
    if missing:
        raise ModelError(f"{path} is not a whole Whisper: it lacks {', '.join(missing)}")
    width, mels, _ = named["encoder.conv1.weight"].shape
    vocab_size, decoder_width = named["decoder.embed.weight"].shape
    if width % HEAD_WIDTH or width != decoder_width:
        raise ModelError(
            f"{path}: encoder and decoder are {width} and {decoder_width} wide; expected one multiple of {HEAD_WIDTH}"
        )
    whisper_id(ENDOFTEXT, vocab_size)  # refuses English-only vocabularies
    shape: dict[str, int] = {"width": width, "heads": width // HEAD_WIDTH}
    encoder_config = EncoderConfig(
        **shape, mels=mels, layers=_layers(named, "encoder"), positions=len(named["encoder.positions"])
    )
    decoder_config = WhisperDecoderConfig(
        **shape,
        vocab_size=vocab_size,
        layers=_layers(named, "decoder"),
        positions=len(named["decoder.positions"]),
    )
    with skeleton():
        modules = {"encoder": WhisperEncoder(encoder_config), "decoder": WhisperDecoder(decoder_config)}
    wanted = {f"{side}.{name}": x for side, module in modules.items() for name, x in module.state_dict().items()}
    problems = [f"missing {name}" for name in wanted if name not in named]
    problems += [f"unexpected {name}" for name in named if name not in wanted]
    problems += [
        f"{name} is {tuple(named[name].shape)} where {tuple(x.shape)} is needed"
        for name, x in wanted.items()
        if name in named and named[name].shape != x.shape
    ]
    if problems:
        shown = "; ".join(problems[:_SHOWN]) + (f"; and {len(problems) - _SHOWN} more" if problems[_SHOWN:] else "")
        raise ModelError(f"{path} is not a Whisper of {width} channels: {shown}")
    states = {side: {name: named[f"{side}.{name}"] for name in module.state_dict()} for side, module in modules.items()}
    return WhisperWeights(states["encoder"], states["decoder"], encoder_config, decoder_config, sha256)


def _layers(named: Mapping[str, Tensor], side: str) -> int:
    return len({name.split(".")[2] for name in named if name.startswith(f"{side}.blocks.")})


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """A hash of tensors that is the same for every file format they were published in.

    Whisper was released in half precision: formats that store it in more hold the same numbers.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].to(torch.float16).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
