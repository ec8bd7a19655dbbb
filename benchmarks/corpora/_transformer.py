"""A BERT encoder with a language-modelling head tied to its token embeddings, in any float dtype, with adapters.

Module names are those of the published weights, so that these load by name. Matrix products are computed in float32
from operands of the parameters' dtype, and their results, gradients included, are rounded to it: what an accelerator
does with bfloat16, and seventy times faster than bfloat16 arithmetic on a processor without it (measured with AVX2).
For float32 nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes; the defaults are those of MiniLM-L6: 22.6 million parameters."""

    vocabulary: int = 30522
    width: int = 384
    inner_width: int = 1536
    heads: int = 12
    layers: int = 6
    places: int = 512


class Linear(nn.Linear):
    """A matrix product accumulated in float32; with `add_adapter`, frozen plus a product of two small matrices."""

    def add_adapter(self, rank: int) -> None:
        """Freeze weight and bias; from now on only `lora_A` (rank, inputs) and `lora_B` (outputs, rank) train."""
        self.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, values: Tensor) -> Tensor:
        """(…, inputs) to (…, outputs)."""
        result = functional.linear(values.float(), self.weight.float(), self.bias.float())
        if "lora_A" in self._parameters:
            result = result + functional.linear(functional.linear(values.float(), self.lora_A), self.lora_B)
        return result.to(values.dtype)


class Transformer(nn.Module):
    """Token ids to the hidden states of the last layer; `logits` scores the vocabulary for some of them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.Sequential(*(_Layer(config) for _ in range(config.layers)))})

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) ids to (rows, length, width)."""
        hidden: Tensor = self.encoder["layer"](self.embeddings(tokens))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(places, width) to (places, vocabulary), float32, by the embeddings themselves: a tied head."""
        return hidden.float() @ self.embeddings.word_embeddings.weight.float().T


class _Embeddings(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.position_embeddings = nn.Embedding(config.places, config.width)
        self.token_type_embeddings = nn.Embedding(2, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=1e-12)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.position_embeddings.weight[: tokens.shape[1]]
        summed = self.word_embeddings(tokens) + places + self.token_type_embeddings.weight[0]
        normalised: Tensor = self.LayerNorm(summed)
        return normalised


class _Layer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, inner = config.width, config.inner_width
        self.attention = nn.ModuleDict({"self": _Attention(width, config.heads), "output": _Residual(width, width)})
        self.intermediate = nn.ModuleDict({"dense": Linear(width, inner)})
        self.output = _Residual(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        attended = self.attention["output"](self.attention["self"](hidden), hidden)
        result: Tensor = self.output(functional.gelu(self.intermediate["dense"](attended)), attended)
        return result


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        split = (rows, length, self.heads, width // self.heads)
        query, key, value = (
            projection(hidden).view(split).transpose(1, 2).float() for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2).reshape(rows, length, width).to(hidden.dtype)


class _Residual(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.dense = Linear(inputs, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, values: Tensor, skipped: Tensor) -> Tensor:
        normalised: Tensor = self.LayerNorm(self.dense(values) + skipped)
        return normalised
