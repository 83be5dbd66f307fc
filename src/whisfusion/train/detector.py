"""Makes a detector of languages: all of Whisper's own, or less of it, taught to answer as before.

No transcripts are needed, and no speech in each of the languages: what is learned is to answer as Whisper does,
whatever is heard. So that it is not learned for the speech at hand alone, most clips are made odd: played backwards, at
another speed, cut together with others, in noise.

Letters: N clips, B clips of a batch, T audio positions, D width, X languages, U units.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion import quantise
from whisfusion.audio import SAMPLE_RATE
from whisfusion.checkpoint import Model
from whisfusion.data.augment import at_speed
from whisfusion.data.shares import target_shares
from whisfusion.data.utterance import Utterance, load_samples
from whisfusion.detector import DetectorConfig, LanguageDetector, of_features
from whisfusion.errors import OptionError
from whisfusion.mel import log_mel
from whisfusion.tokenizer import LANGUAGES, STARTOFTRANSCRIPT, embedding_rows, get_tokenizer
from whisfusion.whisper import WhisperDecoder

Encode = Callable[[np.ndarray], Tensor]
"""Samples of one clip to the encoder's features of it (T, D)."""
Progress = Callable[[int, int, str], None]
"""Told how much is done, how much there is, and what is being done."""

_NEVER = -1e4
"""Logit of a language that a Whisper does not know."""
_KEPT_OUT = 0.05
"""Share of the clips that are not learned from."""
_POSITIONS = 24_000
"""Audio positions of a batch."""
_LOOKED_AT = 1_500
"""Clips that tell which units matter."""
_WARM_UP = 50
_OWN_WEIGHT = 2.0
"""What an error in one of the model's own languages weighs more than one in any."""


@dataclass(frozen=True)
class Teaching:
    """How a detector that was cut down is taught."""

    clips: int = 20_000
    """Clips that are heard."""
    odd: float = 0.75
    """Share of them that are made odd."""
    passes: float = 8
    """How often each is learned from."""
    learning_rate: float = 5e-4
    seed: int = 42

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be more than 0, not {value}"
            for name in ("clips", "passes", "learning_rate")
            if not (value := getattr(self, name)) > 0
        ]
        if not 0 <= self.odd <= 1:
            problems.append(f"odd must be between 0 and 1, not {self.odd}")
        OptionError.collect(problems)


@dataclass(frozen=True)
class Taught:
    """A detector, and how well it learned."""

    detector: LanguageDetector
    kept_out: int
    """Clips that it did not learn from."""
    agreed: float
    """Share of them in which it says what Whisper says."""


def encoder_of(model: Model) -> Encode:
    """What the model's encoder makes of a clip, as when the model is used: in int8 on a CPU if it is kept so."""
    encoder, device = model.encoder, model.encoder.positions.device
    if model.stored_int8 and device.type == "cpu" and quantise.is_fast_here():
        quantise.to_int8(encoder)

    @torch.inference_mode()
    def encode(samples: np.ndarray) -> Tensor:
        mel = log_mel([samples], n_mels=encoder.config.mels, window=model.config.window, device=device)
        return encoder(mel.mel_BMF)[0]

    return encode


@torch.no_grad()
def whole_detector(decoder: WhisperDecoder) -> LanguageDetector:
    """All of a Whisper's decoder that has to do with the language: the same answers."""
    config = decoder.config
    whole = LanguageDetector(DetectorConfig(config.layers, 4 * config.width, config.width, config.heads))
    x_D = decoder.embed.weight[STARTOFTRANSCRIPT] + decoder.positions[0]
    for layer, block in zip(whole.layers, decoder.blocks, strict=True):
        own, cross = block.self_attn, block.cross_attn
        if layer.first:
            x_D = x_D + own.out(own.v(block.self_norm(x_D)))
            layer.asked_HD.copy_(of_features(cross.q(block.cross_norm(x_D))[None], cross.k.weight, config.heads)[0])
        else:
            layer.self_attn.weight.copy_(own.out.weight @ own.v.weight)
            layer.self_attn.bias.copy_(own.out(own.v.bias))
            layer.self_norm.load_state_dict(block.self_norm.state_dict())
            layer.cross_norm.load_state_dict(block.cross_norm.state_dict())
            layer.q.load_state_dict(cross.q.state_dict())
            layer.k.load_state_dict(cross.k.state_dict())
        layer.v.load_state_dict(cross.v.state_dict())
        layer.out.load_state_dict(cross.out.state_dict())
        layer.ffn_norm.load_state_dict(block.ffn_norm.state_dict())
        layer.up.load_state_dict(block.ffn.up.state_dict())
        layer.down.load_state_dict(block.ffn.down.state_dict())
    whole.start_D.copy_(x_D)
    whole.norm.load_state_dict(decoder.norm.state_dict())
    rows = embedding_rows(config.vocab_size)
    row_X = [rows[get_tokenizer().language_id(language)] for language in LANGUAGES]
    whole.head.weight.copy_(decoder.embed.weight[[row or 0 for row in row_X]])
    whole.head.bias.copy_(torch.tensor([_NEVER if row is None else 0.0 for row in row_X]))
    return whole.requires_grad_(False).eval()


def taught_detector(
    whole: LanguageDetector,
    config: DetectorConfig,
    utterances: Sequence[Utterance],
    encode: Encode,
    file: BinaryIO,
    *,
    languages: Sequence[str],
    teaching: Teaching,
    progress: Progress | None = None,
) -> Taught:
    """Cut `whole` down to the shape of `config`, and teach it to answer as before.

    languages: those that matter most. file: where features are kept while they are learned from, 16 bits a number.
    Raises AudioError for a clip that cannot be read.
    """
    tell = progress or (lambda done, total, what: None)
    clips = _hear(utterances, encode, file, teaching, tell)
    answers_NX = clips.through(whole)
    known_X = whole.head.bias > _NEVER
    answers_NX = (answers_NX - answers_NX[:, known_X].mean(1, keepdim=True)).masked_fill(~known_X, 0.0)
    order = random.Random(teaching.seed).sample(range(len(clips)), len(clips))
    kept_out, learned = np.split(np.array(order), [max(1, round(_KEPT_OUT * len(order)))])
    own = [place for place, language in enumerate(LANGUAGES) if language in languages and known_X[place]]
    student = _cut(whole, config, clips, learned.tolist()[:_LOOKED_AT])
    _fit_head(student, clips, learned.tolist(), answers_NX)
    _teach(student, clips, learned.tolist(), answers_NX, own, known_X, teaching, tell)
    student.requires_grad_(False).eval()
    student.head.bias.masked_fill_(~known_X, _NEVER)
    says_N, said_N = (logits_NX[:, own].argmax(1) for logits_NX in (clips.through(student), answers_NX))
    agreed = (says_N == said_N)[torch.from_numpy(kept_out)].double().mean().item()
    return Taught(student, len(kept_out), agreed)


def odd(samples: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Speech that nobody has spoken so; `other` may be heard after it, or behind it."""
    samples, other = (_turned(clip, rng) for clip in (samples, other))
    how = rng.choice(["joined", "mixed", "noisy", "narrow", "plain"], p=[0.3, 0.1, 0.2, 0.1, 0.3])
    if how == "joined":
        seconds = int(rng.integers(1, 5))
        samples = np.concatenate([samples[: seconds * SAMPLE_RATE], other[: (8 - seconds) * SAMPLE_RATE]])
    elif how == "mixed":
        both = min(len(samples), len(other))
        samples = samples[:both] + np.float32(rng.uniform(0.2, 1)) * other[:both]
    elif how == "noisy":
        power = float(np.mean(np.square(samples))) / 10 ** (rng.uniform(0, 25) / 10)
        noise = _in_band(rng.standard_normal(len(samples)), lambda hertz: np.maximum(hertz, 50) ** -rng.uniform(0, 0.8))
        samples = samples + noise * np.sqrt(power / max(float(np.mean(np.square(noise))), 1e-12))
    elif how == "narrow":
        low, high = rng.uniform(50, 400), rng.uniform(2500, 7000)
        samples = _in_band(samples, lambda hertz: np.where((hertz < low) | (hertz > high), 0.02, 1.0))
    longest = int(rng.choice([3, 5, 8, 12])) * SAMPLE_RATE
    return np.ascontiguousarray(samples[:longest], dtype=np.float32)


def _turned(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if rng.random() < 0.4:
        samples = samples[::-1].copy()
    return at_speed(samples, round(float(rng.uniform(0.77, 1.28)), 2)) if rng.random() < 0.8 else samples


def _in_band(samples: np.ndarray, gain: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    hertz = np.fft.rfftfreq(len(samples), 1 / SAMPLE_RATE)
    return np.fft.irfft(np.fft.rfft(samples) * gain(hertz), len(samples)).astype(np.float32)


@dataclass(frozen=True)
class _Clips:
    """Features of clips, one after another in a file."""

    features: np.ndarray
    """(positions of all clips, D), float16."""
    starts: list[int]
    """Where each begins, and where the last ends."""
    device: torch.device

    def __len__(self) -> int:
        return len(self.starts) - 1

    def length(self, row: int) -> int:
        return self.starts[row + 1] - self.starts[row]

    def padded(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Features (B, T, D) and which positions are a clip's own (B, T)."""
        own = [torch.from_numpy(self.features[self.starts[row] : self.starts[row + 1]].copy()) for row in rows]
        lengths = torch.tensor([len(clip) for clip in own])
        audio_BTD = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
        heard_BT = torch.arange(audio_BTD.shape[1]) < lengths[:, None]
        return audio_BTD.to(self.device).float(), heard_BT.to(self.device)

    def batches(self, rows: Sequence[int], rng: random.Random) -> list[list[int]]:
        """Of about the same length, in any order."""
        batches: list[list[int]] = [[]]
        for row in sorted(rows, key=lambda row: self.length(row) + rng.uniform(0, 30)):
            if batches[-1] and (len(batches[-1]) + 1) * self.length(row) > _POSITIONS:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        return batches

    @torch.no_grad()
    def through(self, module: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What `module` makes of every clip."""
        batches = self.batches(range(len(self)), random.Random(0))
        made = torch.cat([module(*self.padded(rows)) for rows in batches])
        return made[torch.tensor([row for rows in batches for row in rows]).argsort()]


def _hear(
    utterances: Sequence[Utterance], encode: Encode, file: BinaryIO, teaching: Teaching, tell: Progress
) -> _Clips:
    """Draw clips by the paper's shares of languages and datasets, make most of them odd, and hear them."""
    rng = np.random.default_rng(teaching.seed)
    buckets: dict[tuple[str, str], list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        buckets[utterance.language, utterance.dataset].append(utterance)
    shares = target_shares({bucket: sum(u.duration for u in own) / 3600 for bucket, own in buckets.items()})
    names, chances = list(shares), np.array(list(shares.values()))

    def draw() -> np.ndarray:
        own = buckets[names[rng.choice(len(names), p=chances / chances.sum())]]
        return load_samples(own[rng.integers(len(own))])[: 30 * SAMPLE_RATE]

    starts, features_TD = [0], torch.empty(0)
    for done in range(teaching.clips):
        samples = draw()
        if rng.random() < teaching.odd:
            samples = odd(samples, draw(), rng)
        features_TD = encode(samples)
        file.write(features_TD.to("cpu", torch.float16).numpy().tobytes())
        starts.append(starts[-1] + len(features_TD))
        tell(done + 1, teaching.clips, "hearing clip")
    file.flush()
    features = np.memmap(file, dtype=np.float16, mode="r", shape=(starts[-1], features_TD.shape[1]))
    return _Clips(features, starts, features_TD.device)


@torch.no_grad()
def _cut(whole: LanguageDetector, config: DetectorConfig, clips: _Clips, rows: Sequence[int]) -> LanguageDetector:
    """The first layers, and of their units those that vary most in what they add; the others add their mean."""
    hidden: list[list[Tensor]] = [[] for _ in range(config.layers)]
    hooks = [
        layer.down.register_forward_pre_hook(lambda _, given, own=own: own.append(given[0]))
        for layer, own in zip(whole.layers, hidden, strict=False)
    ]
    for batch in clips.batches(rows, random.Random(0)):
        whole(*clips.padded(batch))
    for hook in hooks:
        hook.remove()
    state = {name: value for name, value in whole.state_dict().items() if not name.startswith("layers.")}
    for number, (layer, own) in enumerate(zip(whole.layers, hidden, strict=False)):
        units_BU = torch.cat(own)
        added_U = units_BU.var(0) * layer.down.weight.square().sum(0)
        kept_U = added_U.argsort(descending=True)[: config.hidden]
        mean_U = units_BU.mean(0).index_fill(0, kept_U, 0.0)
        kept = {
            "up.weight": layer.up.weight[kept_U],
            "up.bias": layer.up.bias[kept_U],
            "down.weight": layer.down.weight[:, kept_U],
            "down.bias": layer.down.bias + layer.down.weight @ mean_U,
        }
        state |= {f"layers.{number}.{name}": value for name, value in {**layer.state_dict(), **kept}.items()}
    student = LanguageDetector(config).to(clips.device)
    student.load_state_dict(state)
    return student


@torch.no_grad()
def _fit_head(student: LanguageDetector, clips: _Clips, rows: Sequence[int], answers_NX: Tensor) -> None:
    """What the last layers said is read from the last one that is left: least squares."""
    states_ND = clips.through(lambda audio_BTD, heard_BT: student.states(audio_BTD, heard_BT)[-1])[rows]
    design_NE = F.pad(states_ND, (0, 1), value=1.0).double()
    gram_EE = design_NE.T @ design_NE + 10 * torch.eye(design_NE.shape[1], device=clips.device)
    weight_EX = torch.linalg.solve(gram_EE, design_NE.T @ answers_NX[rows].double()).float()
    student.head.weight.copy_(weight_EX[:-1].T)
    student.head.bias.copy_(weight_EX[-1])


def _teach(
    student: LanguageDetector,
    clips: _Clips,
    rows: Sequence[int],
    answers_NX: Tensor,
    own: Sequence[int],
    known_X: Tensor,
    teaching: Teaching,
    tell: Progress,
) -> None:
    """To give the same logits, and the same distribution over the languages that matter."""
    rng = random.Random(teaching.seed)
    student.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=teaching.learning_rate, betas=(0.9, 0.98), weight_decay=0)
    steps = max(1, round(teaching.passes * len(clips.batches(rows, rng))))
    queue: list[list[int]] = []
    for step in range(steps):
        queue = queue or clips.batches(rows, rng)
        batch = queue.pop()
        for group in optimizer.param_groups:
            group["lr"] = teaching.learning_rate * min(1.0, (step + 1) / _WARM_UP) * (1 - step / steps)
        logits_BX, target_BX = student(*clips.padded(batch)), answers_NX[batch]
        logits_BX = logits_BX - logits_BX[:, known_X].mean(1, keepdim=True)
        error_BX = (logits_BX - target_BX).square()
        distribution = F.kl_div(logits_BX[:, own].log_softmax(-1), target_BX[:, own].softmax(-1), reduction="batchmean")
        loss = error_BX[:, known_X].mean() + _OWN_WEIGHT * error_BX[:, own].mean() + distribution
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        tell(step + 1, steps, "teaching step")
