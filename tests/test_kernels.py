"""The Triton kernels against the plain torch functions of the same names."""

import importlib.util
import os

import numpy as np
import pytest
import torch
from torch import Tensor

from whisfusion import attention, kernels
from whisfusion.attention import TILES
from whisfusion.blocks import Rotation
from whisfusion.kernels import Lists

# Largest difference from the reference, which rounds in other places: float32, and bf16 numbers of about 1.
FLOAT32_TOLERANCE = 1e-5
BF16_TOLERANCE = 2**-6
# Log-probabilities, of sums over the whole vocabulary.
LOGPROB_TOLERANCE = 1e-4
# How far beyond a token's own stretch of the cumulative distribution a uniform may lie: sums of 50,000 float32 numbers.
UNIFORM_TOLERANCE = 2e-6
TOLERANCES = {torch.float32: FLOAT32_TOLERANCE, torch.bfloat16: BF16_TOLERANCE}


@pytest.fixture(scope="module")
def device() -> str:
    """Where the kernels can run here."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET is not 1")
    return "cpu"


def noise(*shape: int, device: str, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shifted", [True, False])
def test_norms(device, dtype, centred, shifted):
    from whisfusion import kernels_triton

    x_RD = 3 + noise(5, 80, device=device, dtype=dtype)
    weight_D, bias_D, shift_D = (noise(80, device=device, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    rest = (weight_D, bias_D if centred else None, shift_D.float() if shifted else None, 1e-5)
    expected = kernels.norm(x_RD.cpu(), *(x.cpu() if isinstance(x, Tensor) else x for x in rest))
    found = kernels_triton.norm(x_RD, *rest)
    torch.testing.assert_close(found.cpu(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("by", ["rows", "heads"])
@pytest.mark.parametrize("later", [True, False])
def test_norms_of_heads(device, dtype, rotated, by, later):
    from whisfusion import kernels_triton

    rows, heads, width, weights = 12, 6, 16, 3
    whole = noise(rows, heads + 2, width, device=device, dtype=dtype)
    weight_WC = noise(weights, width, device=device, dtype=dtype, seed=1)
    per = {"rows": rows // weights} if by == "rows" else {"heads": heads // weights}
    rotation = Rotation.of(4, width, 1e4, torch.device("cpu")) if rotated else None
    x_RD = noise(rows, 40, device=device, dtype=dtype, seed=2, scale=3.0)
    # Of heads that have weights of their own, the two behind them are values.
    own = heads if by == "rows" else heads + 2
    unnormed = kernels.Unnormed(x_RD.cpu(), 1e-5) if later else None
    expected = whole.clone().cpu()
    kernels.head_norm_(expected[:, :own], weight_WC.cpu(), 1e-5, **per, rotation=rotation, unnormed=unnormed)
    if rotation is not None:
        rotation = Rotation(rotation.cos_LC.to(device), rotation.sin_LC.to(device))
    unnormed = kernels.Unnormed(x_RD, 1e-5) if later else None
    kernels_triton.head_norm_(whole[:, :own], weight_WC, 1e-5, **per, rotation=rotation, unnormed=unnormed)
    torch.testing.assert_close(whole.cpu(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_heads_that_do_not_lie_side_by_side_are_refused(device):
    from whisfusion import kernels_triton

    x_RHC = noise(4, 16, 2, device=device, dtype=torch.float32).transpose(1, 2)
    with pytest.raises(ValueError, match="side by side"):
        kernels_triton.head_norm_(x_RHC, x_RHC[0, :1], 1e-5)


@pytest.mark.parametrize("tiles", [*TILES, TILES[-1]._replace(parts=3)])
@pytest.mark.parametrize("kind", ["all seen", "biased", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(7, 64), (70, 150), (192, 192)])
def test_attention(device, tiles, kind, queries, keys):
    from whisfusion import attention_triton

    # Triton's interpreter has no products of bf16.
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    if kind == "causal":
        keys = queries
    sequences, heads, width = 2, 3, 16
    q_GQHC = noise(sequences, queries, 3, heads, width, device=device, dtype=dtype, scale=3.0)[:, :, 1]
    k_GTHC, v_GTHC = noise(sequences, keys, 2, heads, width, device=device, dtype=dtype, seed=1).unbind(2)
    bias_GT = None
    if kind == "biased":
        seen_GT = torch.arange(keys, device=device) < torch.tensor([[keys], [keys // 2]], device=device)
        bias_GT = noise(sequences, keys, device=device, dtype=dtype, seed=2).masked_fill(~seen_GT, -torch.inf)
    given = [None if x is None else x.cpu().float() for x in (q_GQHC, k_GTHC, v_GTHC, bias_GT)]
    expected = attention.plain(*given, causal=kind == "causal").to(dtype)
    found = attention_triton.attention(q_GQHC, k_GTHC, v_GTHC, bias_GT, causal=kind == "causal", tiles=tiles)
    torch.testing.assert_close(found.cpu(), expected, rtol=BF16_TOLERANCE, atol=BF16_TOLERANCE)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("later", [True, False])
def test_gated_units(device, dtype, later):
    from whisfusion import kernels_triton

    x_R2F = noise(3, 2 * 1100, device=device, dtype=dtype, scale=2.0)
    x_RD = noise(3, 40, device=device, dtype=dtype, seed=2, scale=3.0)
    expected = kernels.swiglu(x_R2F.cpu(), kernels.Unnormed(x_RD.cpu(), 1e-5) if later else None)
    found = kernels_triton.swiglu(x_R2F, kernels.Unnormed(x_RD, 1e-5) if later else None)
    torch.testing.assert_close(found.cpu(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def misses(logits_RV: Tensor, ids_RK: Tensor, uniforms_RK: Tensor, temperature: float) -> Tensor:
    """How far each uniform lies outside its token's own part of the cumulative distribution, in float64."""
    mass_RV = (logits_RV.double() / temperature).softmax(1)
    end_RK = mass_RV.cumsum(1).gather(1, ids_RK)
    start_RK = end_RK - mass_RV.gather(1, ids_RK)
    return torch.maximum(start_RK - uniforms_RK, uniforms_RK - end_RK).clamp(min=0)


@pytest.mark.parametrize("temperature", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("vocabulary", [50_258, 4096, 4097, 7])
@pytest.mark.parametrize("listed", [True, False])
def test_draws_invert_the_cumulative_distribution(device, temperature, vocabulary, listed):
    from whisfusion import kernels_triton

    rows, draws = 6, 4
    logits_RV = noise(rows, vocabulary + 46, device=device, dtype=torch.bfloat16, scale=3.0)
    logits_RV[:, vocabulary:] = 99.0  # no such tokens
    logits_RV[1] = 0.0  # all alike
    logits_RV[2, 3] = 40.0  # one that is certain
    logits_RV[3, : vocabulary // 2] -= 50
    uniforms_RK = torch.rand(rows, draws, generator=torch.Generator().manual_seed(5)).to(device)
    uniforms_RK[:, 0], uniforms_RK[:, 1] = 0.0, 1 - 2**-24
    targets_R = torch.full((1,), min(vocabulary, 50_258) - 1, device=device).expand(rows)
    wanted_R = torch.ones(rows, dtype=torch.bool, device=device)
    wanted_R[4] = False
    lists = None
    if listed:
        allowed_XV = (torch.arange(vocabulary + 46) % torch.tensor([[1], [3]]) == 0).to(device, torch.uint8)
        lists = Lists(allowed_XV, (torch.arange(rows, device=device) % 2).int())
    rest = {"vocabulary": vocabulary, "wanted_R": wanted_R, "lists": lists}
    ids_RK, logprobs_RK, target_logprobs_R = kernels_triton.draw(logits_RV, uniforms_RK, temperature, targets_R, **rest)

    cpu_lists = None if lists is None else Lists(*(values.cpu() for values in lists))
    expected = kernels.draw(
        logits_RV.cpu(), uniforms_RK.cpu(), temperature, targets_R.cpu(), vocabulary=vocabulary, lists=cpu_lists
    )
    keep = wanted_R.cpu()
    ids_RK = ids_RK.cpu()[keep]
    values_RV = logits_RV.cpu()[:, :vocabulary].float()
    if cpu_lists is not None:
        values_RV = values_RV.masked_fill(cpu_lists.allowed_XV[cpu_lists.list_R.long(), :vocabulary] == 0, -torch.inf)
    values_RV = values_RV[keep]
    logprobs = values_RV.log_softmax(1)
    torch.testing.assert_close(target_logprobs_R.cpu()[keep], expected.target_logprobs_R[keep], rtol=0, atol=1e-4)
    torch.testing.assert_close(logprobs_RK.cpu()[keep], logprobs.gather(1, ids_RK), rtol=0, atol=LOGPROB_TOLERANCE)
    if temperature == 0:
        assert torch.equal(ids_RK, values_RV.argmax(1, keepdim=True).expand_as(ids_RK))
        return
    assert misses(values_RV, ids_RK, uniforms_RK.cpu()[keep], temperature).max() < UNIFORM_TOLERANCE
    # A token of no probability is never drawn, at either end either.
    assert (values_RV.div(temperature).softmax(1).gather(1, ids_RK) > 1e-12).all()
    # Almost always it is the very token of the reference.
    assert (ids_RK == expected.ids_RK[keep]).float().mean() >= 0.9


def prefix_sums_in_trees(values: np.ndarray, axis: int) -> np.ndarray:
    """Prefix sums in the way of a GPU, each in an order of its own: where zeros are added they may rise or fall."""
    assert values.ndim == 1
    assert axis == 0
    sums, step = values, 1
    while step < len(values):
        sums = np.concatenate([sums[:step], sums[step:] + sums[:-step]])
        step *= 2
    return sums


# The edge is the last token before the stretch of 4096 that is not allowed, or before a few that are not.
@pytest.mark.parametrize(("vocabulary", "edge"), [(4 * 4096 + 1106, 3 * 4096 - 5), (1106, 1003)])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_draws_are_allowed_tokens_in_whatever_order_sums_are_taken(device, monkeypatch, vocabulary, edge, scale):
    from whisfusion import kernels_triton

    # Triton's interpreter sums from left to right: such sums never fall, and would hide what happens on a GPU.
    monkeypatch.setattr(np, "cumsum", prefix_sums_in_trees)
    rows, temperature = 32, 0.7
    logits_RV = noise(rows, vocabulary + 46, device=device, dtype=torch.bfloat16, scale=scale)
    v = torch.arange(vocabulary + 46)
    allowed_V = (v % 8 < 4) & (v // 4096 != 3)
    values_RV = logits_RV.cpu()[:, :vocabulary].float().masked_fill(~allowed_V[:vocabulary], -torch.inf)
    mass_RV = (values_RV.double() / temperature).softmax(1)
    near_K = torch.arange(-3, 4) * 2.0**-24
    uniforms_RK = (mass_RV.cumsum(1)[:, [edge, -1], None] + near_K).flatten(1).float().clamp(max=1 - 2**-24)
    list_R = torch.zeros(rows, dtype=torch.int32, device=device)
    ids_RK, logprobs_RK, _ = kernels_triton.draw(
        logits_RV,
        uniforms_RK.to(device),
        temperature,
        list_R.long(),
        vocabulary=vocabulary,
        wanted_R=None,
        lists=Lists(allowed_V[None].to(device, torch.uint8), list_R),
    )
    ids_RK = ids_RK.cpu()
    assert ids_RK.max() < vocabulary
    assert allowed_V[ids_RK].all()
    assert (mass_RV.gather(1, ids_RK) > 1e-14).all()
    expected = values_RV.log_softmax(1).gather(1, ids_RK)
    torch.testing.assert_close(logprobs_RK.cpu(), expected, rtol=0, atol=LOGPROB_TOLERANCE)
    assert misses(values_RV, ids_RK, uniforms_RK, temperature).max() < UNIFORM_TOLERANCE


def test_a_draw_of_nothing_still_scores_the_targets(device):
    from whisfusion import kernels_triton

    logits_RV = noise(3, 96, device=device, dtype=torch.float32)
    targets_R = torch.tensor([5, 80, 0], device=device)
    _, _, found = kernels_triton.draw(
        logits_RV, logits_RV.new_zeros(3, 1), 0.0, targets_R, vocabulary=90, wanted_R=None, lists=None
    )
    expected = logits_RV[:, :90].log_softmax(1).gather(1, targets_R[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGPROB_TOLERANCE)
