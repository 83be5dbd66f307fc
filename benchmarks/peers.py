"""Whisper by Hugging Face's generate, with random weights, writing as many tokens as the references have."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from whisfusion.checkpoint import Model
from whisfusion.environment import machine
from whisfusion.evaluate.speed import WARMUP_UTTERANCES, Row
from whisfusion.evaluate.speed_set import SpeedClip
from whisfusion.mel import log_mel
from whisfusion.tokenizer import ENDOFTEXT, get_tokenizer

NAMES = ("whisper-large-v3", "whisper-large-v3-turbo")
_DECODER_LAYERS = {"whisper-large-v3": 32, "whisper-large-v3-turbo": 4}


class Peer:
    """One published shape; with the shape "tiny", a toy of it to try the script."""

    def __init__(self, name: str, model: Model, shape: str) -> None:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        encoder, like = model.config.encoder, model.encoder.positions
        config = WhisperConfig(
            vocab_size=51_866,
            num_mel_bins=encoder.mels,
            d_model=encoder.width,
            encoder_layers=encoder.layers,
            encoder_attention_heads=encoder.heads,
            encoder_ffn_dim=4 * encoder.width,
            decoder_layers=_DECODER_LAYERS[name] if shape == "paper" else 1,
            decoder_attention_heads=encoder.heads,
            decoder_ffn_dim=4 * encoder.width,
            max_target_positions=448,
            bos_token_id=ENDOFTEXT,
            eos_token_id=ENDOFTEXT,
            pad_token_id=ENDOFTEXT,
            decoder_start_token_id=50_258,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
        torch.manual_seed(0)
        with torch.device(like.device):
            self._model = WhisperForConditionalGeneration(config).to(like.dtype).eval()
        self.name, self._mels = name, encoder.mels

    def hear(self, clips: Sequence[SpeedClip]) -> Tensor:
        """Padded spectrograms, outside the timer as everybody's."""
        mel = log_mel([clip.samples for clip in clips], n_mels=self._mels, device=self._model.device)
        return mel.mel_BMF.to(self._model.dtype)

    def milliseconds(self, clips: Sequence[SpeedClip], tokens: Sequence[int]) -> float:
        """An utterance's time, all in one batch, written until the longest is complete."""
        mel_BMF = self.hear(clips)
        prompt_BP = torch.tensor([get_tokenizer().prompt(clip.language) for clip in clips], device=mel_BMF.device)
        count = max(tokens) + 1
        _wait(mel_BMF.device)
        since = time.perf_counter()
        with torch.inference_mode():
            written = self._generate(mel_BMF, prompt_BP, count)
        _wait(mel_BMF.device)
        assert written.shape[1] == prompt_BP.shape[1] + count
        return 1000 * (time.perf_counter() - since) / len(clips)

    def _generate(self, mel_BMF: Tensor, prompt_BP: Tensor, count: int) -> Tensor:
        from transformers import GenerationMixin

        # Whisper's own generate cuts audio into windows and tries again at other temperatures: not what is compared.
        written_BL = GenerationMixin.generate(
            self._model,
            mel_BMF,
            decoder_input_ids=prompt_BP,
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            num_beams=1,
        )
        assert isinstance(written_BL, Tensor)
        return written_BL


def measure(peers: Sequence[Peer], clips: Sequence[SpeedClip], device: torch.device) -> Iterator[Row]:
    """A row for each peer and batch size; in a batch all are written until the longest is complete."""
    counts = {clip.text: len(get_tokenizer().encode(clip.text)) for clip in clips}
    ordered = sorted(clips, key=lambda clip: -clip.seconds)
    for peer in peers:
        for batch in (1, 8, 32):
            parts = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
            for part in parts[-max(1, WARMUP_UTTERANCES // batch) :]:
                peer.milliseconds(part, [counts[clip.text] for clip in part])
            spent = [peer.milliseconds(part, [counts[c.text] for c in part]) * len(part) for part in parts]
            row = Row(
                model=f"{peer.name} (random weights, Hugging Face)",
                engine="generate",
                batch=batch,
                k=1,
                n=1,
                canvas=max(counts.values()) + 1,
                window_s=30,
                rerank=False,
                ms=round(sum(spent) / len(clips), 2),
                rtfx=round(1000 * sum(clip.seconds for clip in clips) / sum(spent), 1),
                device=machine(str(device))["device_name"],
            )
            print(row, flush=True)
            yield row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
