"""Which language is spoken: the part of Whisper's decoder that says so, by itself.

The first token that Whisper writes is the language. Up to there its decoder has one token to work on, the start, and
can be had for less: attention among tokens is a linear map, the first layer always asks the audio the same, and what a
head hears is one weighted mean of the features, so that nothing is made of every frame but its weight. That is the same
answer for a thousandth of the work. Cut down to a few layers, and taught to answer as before (`train/detector.py`), it
is small enough to go with a model.

Letters: B utterances, T audio positions, D width, H heads, C width of a head, X languages.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisfusion.errors import OptionError
from whisfusion.tokenizer import LANGUAGES


@dataclass(frozen=True)
class DetectorConfig:
    """Shape of a detector; the defaults are those of all of Whisper-base's decoder."""

    layers: int = 6
    hidden: int = 2048
    """Units of each layer's feed-forward part."""
    width: int = 512
    heads: int = 8

    def __post_init__(self) -> None:
        problems = [f"{name} must be at least 1, not {value}" for name, value in vars(self).items() if value < 1]
        if not problems and self.width % self.heads:
            problems.append(f"width {self.width} is not a multiple of {self.heads} heads")
        OptionError.collect([f"detector {problem}" for problem in problems])


class _Layer(nn.Module):
    """Whisper's block for one token. The first has no attention to itself and no queries: both are always the same."""

    def __init__(self, config: DetectorConfig, *, first: bool) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        if first:
            self.asked_HD = nn.Parameter(torch.empty(config.heads, width))
        else:
            self.self_norm, self.self_attn = nn.LayerNorm(width), nn.Linear(width, width)
            self.cross_norm = nn.LayerNorm(width)
            self.q, self.k = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.v, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, config.hidden), nn.Linear(config.hidden, width)
        self.first = first

    def forward(self, x_BD: Tensor, audio_BTD: Tensor, heard_BT: Tensor | None) -> Tensor:
        if not self.first:
            x_BD = x_BD + self.self_attn(self.self_norm(x_BD))
        weight_BHT = self._asked(x_BD) @ audio_BTD.transpose(1, 2)
        if heard_BT is not None:
            weight_BHT = weight_BHT.masked_fill(~heard_BT[:, None], -torch.inf)
        mean_BHD = weight_BHT.softmax(-1) @ audio_BTD
        v_HCD = self.v.weight.unflatten(0, (self.heads, -1))
        value_BHC = torch.einsum("bhd,hcd->bhc", mean_BHD, v_HCD)
        x_BD = x_BD + self.out(value_BHC.flatten(1) + self.v.bias)
        return x_BD + self.down(F.gelu(self.up(self.ffn_norm(x_BD))))

    def _asked(self, x_BD: Tensor) -> Tensor:
        """The heads' queries (B, H, D), of the features themselves instead of keys made of them."""
        if self.first:
            return self.asked_HD.expand(len(x_BD), -1, -1)
        return of_features(self.q(self.cross_norm(x_BD)), self.k.weight, self.heads)


class _Layers(nn.ModuleList):
    """A ModuleList that knows what it holds."""

    def __iter__(self) -> Iterator[_Layer]:
        return cast(Iterator[_Layer], super().__iter__())


def of_features(q_BD: Tensor, k_DD: Tensor, heads: int) -> Tensor:
    """Queries (B, H, D) of which the product with features is that of `q_BD` with keys, scaled."""
    k_HCD = k_DD.unflatten(0, (heads, -1))
    q_BHC = q_BD.unflatten(-1, (heads, -1)) / math.sqrt(k_HCD.shape[1])
    return torch.einsum("bhc,hcd->bhd", q_BHC, k_HCD)


class LanguageDetector(nn.Module):
    """Features of the frozen encoder to a logit for every language that Whisper can tell."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
        self.start_D = nn.Parameter(torch.empty(config.width))
        self.layers = _Layers(_Layer(config, first=number == 0) for number in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, len(LANGUAGES))

    def forward(self, audio_BTD: Tensor, heard_BT: Tensor | None = None) -> Tensor:
        """Logits (B, X) in the order of `LANGUAGES`; `heard_BT` is true where a position is a clip's own."""
        return self.head(self.states(audio_BTD, heard_BT)[-1])

    def states(self, audio_BTD: Tensor, heard_BT: Tensor | None = None) -> list[Tensor]:
        """The state (B, D) after each layer; the last one through the norm."""
        x_BD, states = self.start_D.expand(len(audio_BTD), -1), []
        for layer in self.layers:
            x_BD = layer(x_BD, audio_BTD, heard_BT)
            states.append(x_BD)
        return [*states[:-1], self.norm(x_BD)]


def places(languages: Sequence[str]) -> list[int]:
    """Where the logits of these languages are."""
    every = list(LANGUAGES)
    return [every.index(language) for language in languages]
