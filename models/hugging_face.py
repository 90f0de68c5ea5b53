"""Further families of ``transformers``, built from a configuration: nothing is downloaded.  GPT-2 and BERT are in :mod:`.transformer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["LogitsOnly", "bart", "distilbert_mlm", "llama", "roberta_mlm", "t5", "vit_transformers", "whisper"]

_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


class LogitsOnly(nn.Module):  # type: ignore[misc]
    """A model of ``transformers`` in training mode whose forward takes its named inputs in order and returns the logits alone.

    Args:
        model: the model.
        inputs: names of its inputs.
    """

    def __init__(self, model: Any, *inputs: str) -> None:
        """Wraps the model."""
        super().__init__()
        self.model, self.names = model.train(), inputs

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The inputs, in the order of their names -> logits."""
        logits: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return logits


def distilbert_mlm(layers: int = 6, hidden: int = 768, heads: int = 12, vocab: int = 30522, seq: int = 512, dropout: float = 0.1) -> LogitsOnly:
    """DistilBERT (Sanh et al. 2019, arXiv:1910.01108) with its masked-language-model head: 67 million parameters."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(
        vocab_size=vocab,
        dim=hidden,
        n_layers=layers,
        n_heads=heads,
        hidden_dim=4 * hidden,
        max_position_embeddings=seq,
        dropout=dropout,
        attention_dropout=dropout,
    )
    return LogitsOnly(DistilBertForMaskedLM(config), "input_ids")


def roberta_mlm(layers: int = 12, hidden: int = 768, heads: int = 12, vocab: int = 50265, seq: int = 514, dropout: float = 0.1) -> LogitsOnly:
    """RoBERTa (Liu et al. 2019, arXiv:1907.11692) with its masked-language-model head: 125 million parameters; token 1 is padding."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=seq,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **_TOKENS,
    )
    return LogitsOnly(RobertaForMaskedLM(config), "input_ids")


def llama(
    layers: int = 16,
    hidden: int = 2048,
    heads: int = 32,
    groups: int = 8,
    vocab: int = 32000,
    seq: int = 2048,
    dropout: float = 0.1,
) -> LogitsOnly:
    """Llama (Touvron et al. 2023, arXiv:2302.13971) with grouped-query attention and attention dropout: 1.1 billion parameters by default."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=11 * hidden // 4,
        max_position_embeddings=seq,
        attention_dropout=dropout,
        use_cache=False,
        **_TOKENS,
    )
    return LogitsOnly(LlamaForCausalLM(config), "input_ids")


def t5(layers: int = 6, hidden: int = 512, heads: int = 8, vocab: int = 32128, dropout: float = 0.1) -> LogitsOnly:
    """T5 (Raffel et al. 2020, arXiv:1910.10683), the small one: 60 million parameters."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocab,
        d_model=hidden,
        d_kv=hidden // heads,
        d_ff=4 * hidden,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return LogitsOnly(T5ForConditionalGeneration(config), "input_ids", "decoder_input_ids")


def _seq2seq(layers: int, hidden: int, heads: int, vocab: int, dropout: float) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "d_model": hidden,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * hidden,
        "decoder_ffn_dim": 4 * hidden,
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        "use_cache": False,
        "decoder_start_token_id": 2,
        **_TOKENS,
    }


def bart(layers: int = 6, hidden: int = 768, heads: int = 12, vocab: int = 50265, seq: int = 1024, dropout: float = 0.1) -> LogitsOnly:
    """BART base (Lewis et al. 2020, arXiv:1910.13461): 139 million parameters; token 1 is padding."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(max_position_embeddings=seq, forced_eos_token_id=2, **_seq2seq(layers, hidden, heads, vocab, dropout))
    return LogitsOnly(BartForConditionalGeneration(config), "input_ids", "decoder_input_ids")


def whisper(
    layers: int = 4,
    hidden: int = 384,
    heads: int = 6,
    vocab: int = 51865,
    bins: int = 80,
    frames: int = 1500,
    seq: int = 448,
    dropout: float = 0.1,
) -> LogitsOnly:
    """Whisper tiny (Radford et al. 2022, arXiv:2212.04356): 38 million parameters; the spectrogram has twice as many columns as frames."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        num_mel_bins=bins,
        max_source_positions=frames,
        max_target_positions=seq,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_seq2seq(layers, hidden, heads, vocab, dropout),
    )
    return LogitsOnly(WhisperForConditionalGeneration(config), "input_features", "decoder_input_ids")


def vit_transformers(
    image: int = 224, patch: int = 16, layers: int = 12, hidden: int = 768, heads: int = 12, num_classes: int = 1000, dropout: float = 0.1
) -> LogitsOnly:
    """ViT-B/16 as ``transformers`` writes it: 86.6 million parameters."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        image_size=image,
        patch_size=patch,
        num_labels=num_classes,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return LogitsOnly(ViTForImageClassification(config), "pixel_values")
