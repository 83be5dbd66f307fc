"""Every published format gives the same tensors under our names; anything out of place is named and refused."""

import hashlib
import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from whisfusion import hub, weights
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.errors import DownloadError, ModelError
from whisfusion.weights import WhisperWeights, load_whisper, load_whisper_weights
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig

ENCODER = EncoderConfig(mels=80, width=64, layers=2, heads=1, positions=50)
DECODER = WhisperDecoderConfig(vocab_size=51_865, width=64, layers=1, heads=1)
INT8_STEP = 0.5 / 127  # of the largest value of a row: rounding to the nearest of 255 levels


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Random weights under our names, with the side in front."""
    torch.manual_seed(0)
    modules = {"encoder": WhisperEncoder(ENCODER), "decoder": WhisperDecoder(DECODER)}
    shapes = {f"{side}.{name}": x.shape for side, module in modules.items() for name, x in module.state_dict().items()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def as_openai(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "self_attn": "attn",
        "self_norm": "attn_ln",
        "cross_norm": "cross_attn_ln",
        "ffn_norm": "mlp_ln",
        "ffn.up": "mlp.0",
        "ffn.down": "mlp.2",
        ".q.": ".query.",
        ".k.": ".key.",
        ".v.": ".value.",
        "encoder.norm": "encoder.ln_post",
        "decoder.norm": "decoder.ln",
        "embed.": "token_embedding.",
        "positions": "positional_embedding",
    }
    return renamed(tensors, names)


def as_hugging_face(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "blocks": "layers",
        "self_norm": "self_attn_layer_norm",
        "cross_attn": "encoder_attn",
        "cross_norm": "encoder_attn_layer_norm",
        "ffn_norm": "final_layer_norm",
        "ffn.up": "fc1",
        "ffn.down": "fc2",
        ".q.": ".q_proj.",
        ".k.": ".k_proj.",
        ".v.": ".v_proj.",
        ".out.": ".out_proj.",
        "coder.norm": "coder.layer_norm",
        "embed.": "embed_tokens.",
        "positions": "embed_positions.weight",
    }
    return {f"model.{name}": x for name, x in renamed(tensors, names).items()}


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    result = {}
    for name, x in tensors.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        result[name] = x
    return result


def as_ctranslate2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused projections, with a bias of zeros for the keys; one setting; slashes in names."""
    result = {"decoder/num_heads": torch.tensor(1, dtype=torch.int16)}
    for name, x in tensors.items():
        if ".q." in name and "self_attn" in name:
            k = tensors.get(name.replace(".q.", ".k."), torch.zeros(len(x)))
            result[name.replace("self_attn.q", "self_attention/linear_0")] = torch.cat(
                (x, k, tensors[name.replace(".q.", ".v.")])
            )
        elif ".v." in name and "cross_attn" in name:
            k = tensors.get(name.replace(".v.", ".k."), torch.zeros(len(x)))
            result[name.replace("cross_attn.v", "attention/linear_1")] = torch.cat((k, x))
        elif ".k." not in name and ".v." not in name:
            result[name] = x
    names = {
        "self_attn.out": "self_attention.linear_1",
        "self_norm": "self_attention.layer_norm",
        "cross_attn.q": "attention.linear_0",
        "cross_attn.out": "attention.linear_2",
        "cross_norm": "attention.layer_norm",
        "ffn_norm": "ffn.layer_norm",
        "ffn.up": "ffn.linear_0",
        "ffn.down": "ffn.linear_1",
        "coder.norm": "coder.layer_norm",
        "norm.weight": "norm.gamma",
        "norm.bias": "norm.beta",
        "embed.": "embeddings.",
        "positions": "position_encodings.encodings",
        "blocks.": "layer_",
        ".": "/",
    }
    return renamed(result, names)


def write_ctranslate2(
    folder: Path, variables: dict[str, Tensor], *, spec: str = "WhisperSpec", version: int = 6
) -> Path:
    kinds = [torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]

    def string(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    data = struct.pack("<I", version) + string(spec) + struct.pack("<II", 3, len(variables))
    for name, x in variables.items():
        raw = x.reshape(-1).view(torch.uint8).numpy().tobytes()
        data += string(name) + struct.pack(f"<B{x.dim()}I", x.dim(), *x.shape)
        data += struct.pack("<BI", kinds.index(x.dtype), len(raw)) + raw
    data += struct.pack("<I", 1) + string("decoder/projection/weight") + string("decoder/embeddings/weight")
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(data)
    return folder


def write_openai(path: Path, state: dict[str, Tensor]) -> Path:
    torch.save({"dims": {"n_mels": 80}, "model_state_dict": state}, path)
    return path


def write_safetensors(folder: Path, state: dict[str, Tensor], *, shards: int = 1) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    place = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(state)}
    for file in set(place.values()):
        save_file({name: x for name, x in state.items() if place[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return folder


def sided(loaded: WhisperWeights) -> dict[str, Tensor]:
    sides = {"encoder": loaded.encoder, "decoder": loaded.decoder}
    return {f"{side}.{name}": x for side, state in sides.items() for name, x in state.items()}


def assert_same(loaded: WhisperWeights, tensors: dict[str, Tensor]) -> None:
    assert (loaded.encoder_config, loaded.decoder_config) == (ENCODER, DECODER)
    found = sided(loaded)
    assert found.keys() == tensors.keys()
    for name, x in found.items():
        assert torch.equal(x.float(), tensors[name]), name


def test_openai(tmp_path: Path, tensors: dict[str, Tensor]):
    path = write_openai(tmp_path / "tiny.pt", as_openai(tensors))
    loaded = load_whisper_weights(path)
    assert_same(loaded, tensors)
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_hugging_face(tmp_path: Path, tensors: dict[str, Tensor]):
    folder = write_safetensors(tmp_path / "hf", as_hugging_face(tensors))
    loaded = load_whisper_weights(str(folder))
    assert_same(loaded, tensors)
    assert loaded.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_hugging_face_in_shards(tmp_path: Path, tensors: dict[str, Tensor]):
    folder = write_safetensors(tmp_path / "hf", as_hugging_face(tensors), shards=3)
    loaded = load_whisper_weights(folder)
    assert_same(loaded, tensors)
    digests = [hub.file_sha256(file) for file in sorted(folder.glob("*.safetensors"))]
    assert loaded.sha256 == hashlib.sha256("".join(digests).encode()).hexdigest()
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003\.safetensors"):
        load_whisper_weights(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ctranslate2(tmp_path: Path, tensors: dict[str, Tensor], dtype: torch.dtype):
    exact = {name: x.to(dtype).float() for name, x in tensors.items()}
    variables = {name: x.to(dtype) if x.dim() else x for name, x in as_ctranslate2(exact).items()}
    assert_same(load_whisper_weights(write_ctranslate2(tmp_path / "ct2", variables)), exact)


def test_ctranslate2_int8_and_int16(tmp_path: Path, tensors: dict[str, Tensor]):
    variables = as_ctranslate2(tensors)
    for name in [name for name in variables if name.endswith("/weight")]:
        x = variables[name]
        scale = 127 / x.abs().flatten(1).amax(1)
        variables[name] = (x * scale.reshape(-1, *[1] * (x.dim() - 1))).round().to(torch.int8)
        variables[f"{name}_scale"] = scale
    x = tensors["encoder.blocks.1.ffn.up.weight"]
    variables["encoder/layer_1/ffn/linear_0/weight"] = (x * 200).round().to(torch.int16)
    variables["encoder/layer_1/ffn/linear_0/weight_scale"] = torch.tensor(200.0)
    loaded = sided(load_whisper_weights(write_ctranslate2(tmp_path / "ct2", variables)))
    assert loaded.keys() == tensors.keys()
    for name, x in tensors.items():
        if x.dim() > 1 and "positions" not in name:
            step = x.abs().flatten(1).amax(1) * INT8_STEP
            assert ((loaded[name] - x).abs().flatten(1).amax(1) <= step * 1.001).all(), name
        else:
            assert torch.equal(loaded[name], x), name


def test_no_two_tensors_share_memory(tmp_path: Path, tensors: dict[str, Tensor]):
    """A state dict that does could not be saved as safetensors."""
    loaded = sided(load_whisper_weights(write_ctranslate2(tmp_path / "ct2", as_ctranslate2(tensors))))
    assert len({x.untyped_storage().data_ptr() for x in loaded.values()}) == len(loaded)


def test_half_precision_files_load_as_asked(tmp_path: Path, tensors: dict[str, Tensor]):
    half = {name: x.half() for name, x in as_openai(tensors).items()}
    path = write_openai(tmp_path / "tiny.pt", half)
    assert load_whisper_weights(path).encoder["conv1.weight"].dtype == torch.float16
    for dtype in (torch.float32, torch.bfloat16):
        whisper = load_whisper(path, dtype=dtype)
        for module in (whisper.encoder, whisper.decoder):
            assert {x.dtype for x in module.parameters()} == {dtype}
            assert not any(x.requires_grad or x.is_meta for x in module.parameters())
            assert not module.training
    assert whisper.sha256 == hub.file_sha256(path)


def test_every_problem_is_named_at_once(tmp_path: Path, tensors: dict[str, Tensor]):
    state = as_openai(tensors)
    del state["decoder.blocks.0.cross_attn.key.weight"]
    state["encoder.blocks.1.mlp.0.bias"] = torch.zeros(3)
    state["encoder.extra"] = torch.zeros(1)
    state["head.weight"] = torch.zeros(1)
    with pytest.raises(ModelError) as caught:
        load_whisper_weights(write_openai(tmp_path / "tiny.pt", state))
    for part in (
        "missing decoder.blocks.0.cross_attn.k.weight",
        "unexpected encoder.extra",
        "unexpected head.weight",
        "encoder.blocks.1.ffn.up.bias is (3,) where (256,) is needed",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("gone", ["encoder.conv1.weight", "decoder.token_embedding.weight", "decoder.blocks."])
def test_half_a_model_is_refused(tmp_path: Path, tensors: dict[str, Tensor], gone: str):
    state = {name: x for name, x in as_openai(tensors).items() if not name.startswith(gone)}
    with pytest.raises(ModelError, match="not a whole Whisper: it lacks"):
        load_whisper_weights(write_openai(tmp_path / "tiny.pt", state))


def test_english_only_models_are_refused(tmp_path: Path, tensors: dict[str, Tensor]):
    state = as_openai(tensors)
    state["decoder.token_embedding.weight"] = state["decoder.token_embedding.weight"][:-1].clone()
    with pytest.raises(ModelError, match=r"does not end in \.en"):
        load_whisper_weights(write_openai(tmp_path / "tiny.en.pt", state))


def test_widths_must_fit(tmp_path: Path, tensors: dict[str, Tensor]):
    state = as_openai(tensors)
    state["decoder.token_embedding.weight"] = torch.zeros(51_865, 32)
    with pytest.raises(ModelError, match="64 and 32 wide"):
        load_whisper_weights(write_openai(tmp_path / "tiny.pt", state))


def test_a_key_bias_or_a_head_of_its_own_is_no_whisper(tmp_path: Path, tensors: dict[str, Tensor]):
    variables = as_ctranslate2(tensors)
    variables["decoder/layer_0/self_attention/linear_0/bias"] = torch.ones(3 * 64)
    with pytest.raises(ModelError, match=r"self_attn\.k\.bias is not zero"):
        load_whisper_weights(write_ctranslate2(tmp_path / "bias", variables))
    state = as_hugging_face(tensors)
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"] + 1
    with pytest.raises(ModelError, match=r"proj_out\.weight differs"):
        load_whisper_weights(write_safetensors(tmp_path / "head", state))


def test_a_stored_copy_of_the_tied_head_is_passed_over(tmp_path: Path, tensors: dict[str, Tensor]):
    state = as_hugging_face(tensors)
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"].clone()
    assert_same(load_whisper_weights(write_safetensors(tmp_path / "hf", state)), tensors)


def test_damaged_files_are_refused(tmp_path: Path, tensors: dict[str, Tensor]):
    folder = write_ctranslate2(tmp_path / "ct2", as_ctranslate2(tensors))
    whole = (folder / "model.bin").read_bytes()
    for size in (2, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.bin").write_bytes(whole[:size])
        with pytest.raises(ModelError, match="damaged or not of CTranslate2"):
            load_whisper_weights(folder)
    folder = write_safetensors(tmp_path / "hf", as_hugging_face(tensors))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load_whisper_weights(folder)


@pytest.mark.parametrize(
    ("change", "message"), [({"spec": "TransformerSpec"}, "a TransformerSpec"), ({"version": 3}, "version 3")]
)
def test_other_ctranslate2_models_are_refused(tmp_path: Path, change: dict, message: str):
    folder = write_ctranslate2(tmp_path / "ct2", {}, **change)
    with pytest.raises(ModelError, match=message):
        load_whisper_weights(folder)


class Intruder:
    """What a pickle can do: call anything."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_no_code(tmp_path: Path):
    mark, evil = tmp_path / "was here", tmp_path / "evil.pt"
    torch.save({"dims": {}, "model_state_dict": Intruder(mark)}, evil)
    with pytest.raises(ModelError, match="not a checkpoint of plain tensors"):
        load_whisper_weights(evil)
    assert not mark.exists()
    evil.write_bytes(pickle.dumps(Intruder(mark)))
    with pytest.raises(ModelError, match="not a checkpoint of plain tensors"):
        load_whisper_weights(evil)
    assert not mark.exists()


def test_other_files_are_refused(tmp_path: Path):
    torch.save({"state": 1}, tmp_path / "other.pt")
    with pytest.raises(ModelError, match="not OpenAI's Whisper"):
        load_whisper_weights(tmp_path / "other.pt")
    torch.save({"dims": {}, "model_state_dict": {"encoder.conv1.weight": 3}}, tmp_path / "odd.pt")
    with pytest.raises(ModelError, match="not a dictionary of tensors"):
        load_whisper_weights(tmp_path / "odd.pt")
    (tmp_path / "notes.txt").write_text("no weights")
    with pytest.raises(ModelError, match="no Whisper checkpoint"):
        load_whisper_weights(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match="holds no Whisper weights"):
        load_whisper_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="not an index"):
        load_whisper_weights(tmp_path)
    with pytest.raises(ModelError, match="there is no model and no folder"):
        load_whisper_weights("no-such-model")


def test_a_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("WHISFUSION_OFFLINE", "1")
    with pytest.raises(DownloadError, match="cannot fetch somebody/whisper-nowhere"):
        load_whisper_weights("somebody/whisper-nowhere")


@pytest.mark.parametrize(
    ("encoder", "decoder", "encoder_parameters"),
    [
        (EncoderConfig(), WhisperDecoderConfig(), 636_968_960),
        (EncoderConfig(), WhisperDecoderConfig(layers=4), 636_968_960),
        (EncoderConfig(80, 384, 4, 6), WhisperDecoderConfig(51_865, 384, 4, 6), 8_208_384),
    ],
    ids=["large-v3", "turbo", "tiny"],
)
def test_published_shapes(encoder: EncoderConfig, decoder: WhisperDecoderConfig, encoder_parameters: int):
    with torch.device("meta"):
        modules = {"encoder": WhisperEncoder(encoder), "decoder": WhisperDecoder(decoder)}
    named = {f"{side}.{name}": x for side, module in modules.items() for name, x in module.state_dict().items()}
    theirs = as_openai(named)
    loaded = weights._checked(Path("published"), weights._rename(theirs, weights._OPENAI), "")
    assert (loaded.encoder_config, loaded.decoder_config) == (encoder, decoder)
    assert sum(x.numel() for x in loaded.encoder.values()) == encoder_parameters
