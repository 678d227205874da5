"""A small GPT: a language model that guesses the next token from those before it.

```
tokens ─→ Embedding ─→ Block ─→ … ─→ Block ─→ Head ─→ logits of the next token
          layers.0     layers.1      layers.depth     layers.depth+1
```

Each layer takes one tensor and returns one tensor, so a pipeline may cut between any two of them. The head has weights
of its own, or with `tied=True` those of the embedding, as in GPT-2: one parameter that the first and the last stage
of a pipeline both hold, and whose gradients they sum.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from microparallel.errors import UsageError
from microparallel.models.loss import cross_entropy


class Embedding(nn.Module):
    """Turns each token number into a vector that says what it is and where it stands."""

    def __init__(self, vocabulary: int, context: int, dim: int) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(context, dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens of shape (batch, time) to vectors of shape (batch, time, dim)."""
        time = tokens.shape[-1]
        if time > self.context:
            raise UsageError(
                f"a sequence of {time} tokens does not fit this model's context of {self.context}: "
                f"pass shorter sequences, or build it with context={time}"
            )
        here: torch.Tensor = self.token(tokens) + self.position.weight[:time]
        return here


class Attention(nn.Module):
    """Lets each position gather from itself and the positions before it, never from those after."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Attend within each head, then mix the heads."""
        batch, time, dim = inputs.shape
        # (batch, time, 3 * dim) → three of (batch, heads, time, dim / heads)
        split = self.query_key_value(inputs).view(batch, time, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        gathered = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: torch.Tensor = self.project(gathered.transpose(1, 2).reshape(batch, time, dim))
        return mixed


class Block(nn.Module):
    """One transformer block: attention, then a small MLP at each position, each added to what came in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm_mlp = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 4 * dim)
        self.project = nn.Linear(4 * dim, dim)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply both halves, normalising before each (pre-norm), so that the sum itself passes untouched."""
        attended = inputs + self.attention(self.norm_attention(inputs))
        outputs: torch.Tensor = attended + self.project(functional.gelu(self.expand(self.norm_mlp(attended))))
        return outputs


class Head(nn.Module):
    """Turns each vector into one logit per token of the vocabulary."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map vectors of shape (batch, time, dim) to logits of shape (batch, time, vocabulary)."""
        logits: torch.Tensor = self.linear(self.norm(inputs))
        return logits


class GPT(nn.Module):
    """A small GPT without dropout, as a list of layers that can be cut anywhere.

    The defaults make a byte-level model of under a million parameters. With `tied`, the head reads its logits off the
    token embedding's own weights; all other weights start as they do without.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 64,
        dim: int = 128,
        heads: int = 4,
        depth: int = 4,
        tied: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "context": context, "dim": dim, "heads": heads, "depth": depth}
        for name, value in sizes.items():
            if value < 1:
                raise UsageError(f"{name}={value}: a GPT needs {name} of at least 1")
        if dim % heads:
            raise UsageError(
                f"dim={dim} cannot be shared out evenly among heads={heads}: "
                f"use dim={math.ceil(dim / heads) * heads}, or a number of heads that divides {dim}"
            )
        embedding = Embedding(vocabulary, context, dim)
        blocks = [Block(dim, heads) for _ in range(depth)]
        head = Head(vocabulary, dim)
        self.layers = nn.ModuleList([embedding, *blocks, head])
        self._initialise(depth)
        if tied:  # only now, so that the same random numbers are drawn as without
            head.linear.weight = embedding.token.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, or with targets (the token after each token) the mean cross-entropy loss."""
        outputs = tokens
        for layer in self.layers:
            outputs = layer(outputs)
        return outputs if targets is None else cross_entropy(outputs, targets)

    def pipeline_layers(self) -> nn.ModuleList:
        """Return the layers, between any two of which a pipeline may cut."""
        return self.layers

    def _initialise(self, depth: int) -> None:
        """Draw the initial weights as GPT-2 does."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # Each block adds two projections to the running sum; the smaller start keeps the sum's size in check.
                std = 0.02 / math.sqrt(2 * depth) if name.endswith("project") else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
