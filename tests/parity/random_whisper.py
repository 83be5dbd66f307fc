"""A Whisper of random weights as Hugging Face makes it, small enough for tests and in no part zero."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration


def random_whisper(**changes) -> WhisperForConditionalGeneration:
    """Two encoder layers, three decoder layers, width 128; `changes` go to WhisperConfig."""
    config = WhisperConfig(
        **{
            "vocab_size": 51_865,
            "d_model": 128,
            "num_mel_bins": 80,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 512,
            "decoder_ffn_dim": 512,
            "max_source_positions": 100,
        }
        | changes
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval()
    # Norms of one and biases of zero would hide a tensor that went to the wrong place.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.1)
    return model
