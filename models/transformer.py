"""GPT-2 and BERT from ``transformers``, built from a configuration: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["BertMaskedLM", "BertSequenceClassifier", "GPT2LanguageModel", "bert_classifier", "bert_mlm", "gpt2"]


class GPT2LanguageModel(nn.Module):  # type: ignore[misc]
    """GPT-2 (Radford et al. 2019) with tied embeddings, returning logits and nothing else.

    Args:
        layers: transformer blocks.
        hidden: width of the residual stream.
        heads: attention heads.
        vocab: vocabulary size.
        seq: longest sequence (positions).
        dropout: probability of the embedding, residual and attention dropouts.
        attention: ``sdpa`` or ``eager``.
    """

    def __init__(
        self,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        vocab: int = 50257,
        seq: int = 1024,
        dropout: float = 0.1,
        attention: str = "sdpa",
    ) -> None:
        """Builds the network with transformers' initialisation."""
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=vocab,
            n_positions=seq,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation=attention,
        )
        self.model = GPT2LMHeadModel(config).train()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (N, T) -> logits (N, T, vocab)."""
        logits: torch.Tensor = self.model(input_ids=input_ids).logits
        return logits


def _bert_config(**options: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=options["vocab"],
        hidden_size=options["hidden"],
        num_hidden_layers=options["layers"],
        num_attention_heads=options["heads"],
        intermediate_size=4 * options["hidden"],
        max_position_embeddings=options["seq"],
        hidden_dropout_prob=options["dropout"],
        attention_probs_dropout_prob=options["dropout"],
        num_labels=options.get("num_classes", 2),
        attn_implementation=options["attention"],
    )


class BertMaskedLM(nn.Module):  # type: ignore[misc]
    """BERT (Devlin et al. 2019, arXiv:1810.04805) with its masked-language-model head; arguments as of :class:`GPT2LanguageModel`."""

    def __init__(
        self,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        vocab: int = 30522,
        seq: int = 512,
        dropout: float = 0.1,
        attention: str = "sdpa",
    ) -> None:
        """Builds the network with transformers' initialisation."""
        super().__init__()
        from transformers import BertForMaskedLM

        config = _bert_config(layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq, dropout=dropout, attention=attention)
        self.model = BertForMaskedLM(config).train()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (N, T) -> logits (N, T, vocab)."""
        logits: torch.Tensor = self.model(input_ids=input_ids).logits
        return logits


class BertSequenceClassifier(nn.Module):  # type: ignore[misc]
    """BERT with its sequence-classification head; arguments as of :class:`GPT2LanguageModel`."""

    def __init__(
        self,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        vocab: int = 30522,
        seq: int = 512,
        num_classes: int = 2,
        dropout: float = 0.1,
        attention: str = "sdpa",
    ) -> None:
        """Builds the network with transformers' initialisation."""
        super().__init__()
        from transformers import BertForSequenceClassification

        config = _bert_config(
            layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq, dropout=dropout, attention=attention, num_classes=num_classes
        )
        self.model = BertForSequenceClassification(config).train()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (N, T) -> logits (N, num_classes)."""
        logits: torch.Tensor = self.model(input_ids=input_ids).logits
        return logits


def gpt2(
    layers: int = 12, hidden: int = 768, heads: int = 12, vocab: int = 50257, seq: int = 1024, dropout: float = 0.1, attention: str = "sdpa"
) -> GPT2LanguageModel:
    """GPT-2 small by default: 124 million parameters."""
    return GPT2LanguageModel(layers, hidden, heads, vocab, seq, dropout, attention)


def bert_mlm(
    layers: int = 12, hidden: int = 768, heads: int = 12, vocab: int = 30522, seq: int = 512, dropout: float = 0.1, attention: str = "sdpa"
) -> BertMaskedLM:
    """BERT base by default: 110 million parameters."""
    return BertMaskedLM(layers, hidden, heads, vocab, seq, dropout, attention)


def bert_classifier(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocab: int = 30522,
    seq: int = 512,
    num_classes: int = 2,
    dropout: float = 0.1,
    attention: str = "sdpa",
) -> BertSequenceClassifier:
    """BERT base by default."""
    return BertSequenceClassifier(layers, hidden, heads, vocab, seq, num_classes, dropout, attention)
