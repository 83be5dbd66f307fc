import importlib.util
import itertools
import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion.ctc import (
    BLANK,
    CLASSES,
    DeviceLoss,
    Spelling,
    byte_targets,
    bytes_to_text,
    ctc_loss,
    ctc_loss_and_places,
    greedy,
    greedy_text,
    greedy_texts,
)

# Relative for losses, absolute for gradients, whose entries lie between -1 and 1. The reference is in float64.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-4
# Rounded twice, to a multiple of 2**-8 near 1: when it is kept, and when it is weighted.
BF16_GRADIENT_TOLERANCE = 2**-7


def logits_of(path: list[int], *, frames: int | None = None) -> Tensor:
    """Frames whose best classes are these; further frames want class 66."""
    path = path + [66] * ((frames or len(path)) - len(path))
    return F.one_hot(torch.tensor(path, dtype=torch.int64), CLASSES).float() * 5


def make_batch(seed: int, *, classes: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Few classes, so that targets repeat; among them a target too long, an empty one and clips without frames."""
    generator = torch.Generator().manual_seed(seed)
    input_lengths_B = torch.tensor([18, 11, 4, 9, 6, 0, 0, 18, 5])
    target_lengths_B = torch.tensor([6, 6, 5, 0, 3, 0, 2, 1, 4])
    logits_BTV = 3 * torch.randn(len(input_lengths_B), 18, classes, generator=generator)
    targets_BS = torch.randint(1, 4, (len(input_lengths_B), 6), generator=generator)
    # Four bytes of one kind need three blanks between them: more than the five frames.
    targets_BS[-1] = 2
    return logits_BTV, targets_BS, input_lengths_B, target_lengths_B


def reference(logits_BTV: Tensor, targets_BS: Tensor, inputs_B: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's losses in float64, and the gradient by the logits of their sum weighted with `weights`."""
    logits_BTV = logits_BTV.double().requires_grad_()
    logp_TBV = logits_BTV.log_softmax(-1).transpose(0, 1)
    losses_B = F.ctc_loss(logp_TBV, targets_BS, inputs_B, lengths_B, reduction="none", zero_infinity=True)
    (gradient_BTV,) = torch.autograd.grad((losses_B * weights(losses_B)).sum(), logits_BTV)
    return losses_B.detach(), gradient_BTV


def weights(losses_B: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.0, len(losses_B), dtype=losses_B.dtype, device=losses_B.device)


def device_loss(*inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    return DeviceLoss.apply(*inputs, None)


def kernel_device() -> str:
    """Where the kernels can run here."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET is not 1")
    return "cpu"


@pytest.mark.parametrize("text", ["", "hello", "Grüße, 世界! 안녕", "\0\U0001f600\x7f"])
def test_bytes_spell_every_text_and_never_use_the_blank(text):
    ids = byte_targets(text)
    assert bytes_to_text(ids) == text
    assert len(ids) == len(text.encode())
    assert all(BLANK < index < CLASSES for index in ids)


def test_every_byte_has_its_own_class():
    assert bytes_to_text(range(1, 129)).encode() == bytes(range(128))
    assert bytes_to_text([0xC3 + 1, 0xBC + 1]) == "ü"


def test_broken_bytes_are_replaced_and_blanks_refused():
    assert bytes_to_text([*byte_targets("a"), 0xFF + 1, *byte_targets("b")]) == "a\ufffdb"
    with pytest.raises(ValueError, match="range"):
        bytes_to_text([BLANK])


def test_greedy_merges_runs_drops_blanks_and_keeps_the_times():
    a, b = byte_targets("ab")
    logits_BTV = torch.stack([logits_of([0, a, a, 0, a, b, b, 0]), logits_of([b, 0], frames=8), logits_of([a] * 8)])
    lengths_B = torch.tensor([8, 2, 0])
    assert greedy(logits_BTV, lengths_B) == [
        Spelling((a, a, b), ((1, 3), (4, 5), (5, 7))),
        Spelling((b,), ((0, 1),)),
        Spelling((), ()),
    ]
    assert greedy_texts(logits_BTV, lengths_B) == ["aab", "b", ""]
    assert greedy_text(logits_BTV[0], 5) == "aa"


@pytest.mark.parametrize("target", [[], [1], [1, 2], [1, 1], [2, 1, 2]])
def test_loss_is_that_of_all_paths_that_spell_the_target(target):
    frames, classes = 4, 3
    logits_TV = torch.randn(frames, classes, generator=torch.Generator().manual_seed(3)).requires_grad_()
    logp_TV = logits_TV.log_softmax(-1)
    paths = [
        sum(logp_TV[t, index] for t, index in enumerate(path))
        for path in itertools.product(range(classes), repeat=frames)
        if [index for index, _ in itertools.groupby(path) if index != BLANK] == target
    ]
    expected = -torch.logsumexp(torch.stack(paths), 0)
    (expected_gradient,) = torch.autograd.grad(expected, logits_TV)

    targets_BS = torch.tensor([target + [0] * (3 - len(target))])
    (loss,) = ctc_loss(logits_TV[None], targets_BS, torch.tensor([frames]), torch.tensor([len(target)]))
    (gradient,) = torch.autograd.grad(loss, logits_TV)
    torch.testing.assert_close(loss, expected, rtol=LOSS_TOLERANCE, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=GRADIENT_TOLERANCE)


@pytest.mark.parametrize("target", [[], [1], [1, 2], [1, 1], [2, 1, 2]])
def test_places_are_those_of_all_paths_that_spell_the_target(target):
    frames, classes = 5, 3
    logits_TV = torch.randn(frames, classes, generator=torch.Generator().manual_seed(4))
    values = [0.0, 0.5, 1.0, 4.0]  # before the first byte, with it, with the second ...
    logp_TV = logits_TV.log_softmax(-1)
    total, expected_T2 = 0.0, torch.zeros(frames, 2)
    for path in itertools.product(range(classes), repeat=frames):
        if [index for index, _ in itertools.groupby(path) if index != BLANK] != target:
            continue
        share = math.exp(sum(logp_TV[t, index].item() for t, index in enumerate(path)))
        total += share
        for t in range(frames):
            heard = len([index for index, _ in itertools.groupby(path[: t + 1]) if index != BLANK])
            past = heard == len(target) and path[t] == BLANK
            expected_T2[t] += share * torch.tensor([values[heard], float(past)])
    targets_BS = torch.tensor([target + [0] * (3 - len(target))])
    losses_B, places_BT2 = ctc_loss_and_places(
        logits_TV[None], targets_BS, torch.tensor([frames]), torch.tensor([len(target)]), torch.tensor([values[1:]])
    )
    torch.testing.assert_close(places_BT2[0], expected_T2 / total, rtol=0, atol=1e-5)
    assert losses_B.item() == pytest.approx(-math.log(total), rel=LOSS_TOLERANCE)


def test_what_lies_beyond_the_lengths_counts_for_nothing():
    logits_BTV, targets_BS, inputs_B, lengths_B = make_batch(1)
    losses_B = ctc_loss(logits_BTV, targets_BS, inputs_B, lengths_B)
    logits_BTV[torch.arange(18) >= inputs_B[:, None]] = 9.0
    targets_BS[torch.arange(6) >= lengths_B[:, None]] = 0
    logits_BTV.requires_grad_()
    again_B = ctc_loss(logits_BTV, targets_BS, inputs_B, lengths_B)
    assert torch.equal(again_B, losses_B)
    again_B.sum().backward()
    assert logits_BTV.grad is not None
    assert not logits_BTV.grad[torch.arange(18) >= inputs_B[:, None]].any()


def test_impossible_targets_have_no_loss_and_no_gradient():
    logits_BTV, targets_BS, inputs_B, lengths_B = make_batch(2)
    logits_BTV.requires_grad_()
    losses_B = ctc_loss(logits_BTV, targets_BS, inputs_B, lengths_B)
    losses_B.sum().backward()
    assert logits_BTV.grad is not None
    impossible_B = torch.tensor([False, False, True, False, False, True, True, False, True])
    assert torch.equal(losses_B == 0, impossible_B)
    assert torch.equal(~logits_BTV.grad.flatten(1).any(1), impossible_B)


def test_half_precision_logits_are_normalised_in_float32():
    logits_BTV, *rest = make_batch(4)
    halved_BTV = logits_BTV.bfloat16()
    losses_B = ctc_loss(halved_BTV, *rest)
    assert losses_B.dtype == torch.float32
    assert torch.equal(losses_B, ctc_loss(halved_BTV.float(), *rest))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_kernels_against_pytorch(seed, integers):
    device = kernel_device()
    logits_BTV, *rest = make_batch(seed)
    expected_B, expected_BTV = reference(logits_BTV, *rest)
    logits_BTV = logits_BTV.to(device).requires_grad_()
    losses_B, _ = device_loss(logits_BTV, *(tensor.to(device, integers) for tensor in rest))
    (losses_B * weights(losses_B)).sum().backward()
    torch.testing.assert_close(losses_B.cpu().double(), expected_B, rtol=LOSS_TOLERANCE, atol=0)
    assert logits_BTV.grad is not None
    torch.testing.assert_close(logits_BTV.grad.cpu().double(), expected_BTV, rtol=0, atol=GRADIENT_TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_kernels_find_the_places_that_the_plain_code_finds(seed):
    device = kernel_device()
    logits_BTV, *rest = make_batch(seed)
    values_BS = torch.rand(rest[0].shape, generator=torch.Generator().manual_seed(seed)).cumsum(1)
    expected_B, expected_BT2 = ctc_loss_and_places(logits_BTV, *rest, values_BS)
    _, expected_BTV = reference(logits_BTV, *rest)
    logits_BTV = logits_BTV.to(device).requires_grad_()
    losses_B, places_BT2 = DeviceLoss.apply(logits_BTV, *(tensor.to(device) for tensor in (*rest, values_BS)))
    (losses_B * weights(losses_B)).sum().backward()
    torch.testing.assert_close(losses_B.cpu(), expected_B, rtol=LOSS_TOLERANCE, atol=0)
    torch.testing.assert_close(places_BT2.cpu(), expected_BT2, rtol=0, atol=GRADIENT_TOLERANCE)
    assert logits_BTV.grad is not None
    torch.testing.assert_close(logits_BTV.grad.cpu().double(), expected_BTV, rtol=0, atol=GRADIENT_TOLERANCE)


def test_kernels_with_more_pairs_than_a_warp_has_threads():
    device = kernel_device()
    generator = torch.Generator().manual_seed(5)
    logits_BTV = torch.randn(2, 90, CLASSES, generator=generator)
    targets_BS = torch.randint(1, CLASSES, (2, 70), generator=generator)
    rest = (targets_BS, torch.tensor([90, 80]), torch.tensor([64, 70]))
    expected_B, expected_BTV = reference(logits_BTV, *rest)
    logits_BTV = logits_BTV.to(device).requires_grad_()
    losses_B, _ = device_loss(logits_BTV, *(tensor.to(device) for tensor in rest))
    (losses_B * weights(losses_B)).sum().backward()
    torch.testing.assert_close(losses_B.cpu().double(), expected_B, rtol=LOSS_TOLERANCE, atol=0)
    assert logits_BTV.grad is not None
    torch.testing.assert_close(logits_BTV.grad.cpu().double(), expected_BTV, rtol=0, atol=GRADIENT_TOLERANCE)


def test_kernels_take_half_precision_and_no_gradient():
    device = kernel_device()
    logits_BTV, *rest = make_batch(6)
    halved_BTV = logits_BTV.bfloat16()
    expected_B, expected_BTV = reference(halved_BTV, *rest)
    rest = [tensor.to(device) for tensor in rest]
    halved_BTV = halved_BTV.to(device)
    torch.testing.assert_close(
        device_loss(halved_BTV, *rest)[0].cpu().double(), expected_B, rtol=LOSS_TOLERANCE, atol=0
    )
    losses_B, _ = device_loss(halved_BTV.requires_grad_(), *rest)
    (losses_B * weights(losses_B)).sum().backward()
    assert halved_BTV.grad is not None
    assert halved_BTV.grad.dtype == torch.bfloat16
    torch.testing.assert_close(halved_BTV.grad.cpu().double(), expected_BTV, rtol=0, atol=BF16_GRADIENT_TOLERANCE)


def test_kernels_of_targets_that_are_all_empty():
    device = kernel_device()
    logits_BTV = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(7))
    expected_B = -logits_BTV.log_softmax(-1)[:, :, BLANK].cumsum(1)[[0, 1], [4, 2]]
    empty = torch.zeros(2, 0, dtype=torch.int64, device=device), torch.tensor([5, 3], device=device)
    losses_B, _ = device_loss(logits_BTV.to(device), *empty, torch.tensor([0, 0], device=device))
    torch.testing.assert_close(losses_B.cpu(), expected_B, rtol=LOSS_TOLERANCE, atol=0)


def test_kernels_do_not_hide_nan():
    device = kernel_device()
    logits_BTV, *rest = make_batch(8)
    logits_BTV[0, 3], logits_BTV[1, 15] = torch.nan, torch.nan
    logits_BTV = logits_BTV.to(device).requires_grad_()
    losses_B, _ = device_loss(logits_BTV, *(tensor.to(device) for tensor in rest))
    losses_B.sum().backward()
    assert logits_BTV.grad is not None
    # The second one's lies beyond its eleven frames.
    assert losses_B.isnan().nonzero().flatten().tolist() == [0]
    assert logits_BTV.grad.flatten(1).isnan().any(1).nonzero().flatten().tolist() == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to capture a graph on")
def test_a_captured_loss_follows_the_lengths_of_each_replay():
    batches = [make_batch(seed) for seed in (9, 10)]
    # The second batch's lengths are the first's in another order.
    batches[1] = tuple(tensor.roll(2, 0) for tensor in batches[1])
    static = [tensor.cuda() for tensor in batches[0]]
    logits_BTV, *rest = static
    logits_BTV.requires_grad_()

    def work() -> tuple[Tensor, Tensor]:
        losses_B = ctc_loss(logits_BTV, *rest)
        return losses_B, torch.autograd.grad((losses_B * weights(losses_B)).sum(), logits_BTV)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses_B, gradient_BTV = work()
    for batch in batches:
        with torch.no_grad():
            for place, tensor in zip(static, batch, strict=True):
                place.copy_(tensor)
        graph.replay()
        expected_B, expected_BTV = reference(*batch)
        torch.testing.assert_close(losses_B.cpu().double(), expected_B, rtol=LOSS_TOLERANCE, atol=0)
        torch.testing.assert_close(gradient_BTV.cpu().double(), expected_BTV, rtol=0, atol=GRADIENT_TOLERANCE)
