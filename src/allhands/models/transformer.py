"""A small GPT: a decoder that predicts the next token.

Names of modules are plain so that a strategy can cut or shard by them: `embed`, `position`,
`layers.N.attn.qkv`, `layers.N.attn.out`, `layers.N.mlp.up`, `layers.N.mlp.down`, `norm`, `head`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allhands.errors import UserError
from allhands.models.images import check_positive


class Attention(nn.Module):
    """Causal self-attention, N x T x width to the same. `qkv` yields queries, then keys, then
    values, each head by head."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width, self.dropout = width // heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # The number of heads is read from the tensor: with qkv sharded over workers each has its
        # own heads only.
        q, k, v = (
            part.view(batch, length, -1, self.head_width).transpose(
                1, 2
            )  # N x heads x T x head_width
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """Four times as wide and back, with GELU. N x T x width to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Input N x T tokens (int64, T <= block_size), output N x T x vocab_size logits, of which row t
    predicts token t + 1.

    With `tied` the head's weight *is* the embedding's (one parameter under two names), as in GPT-2.

    Raises `UserError` when `heads` does not divide `width`, and in `forward` for more than
    `block_size` tokens.
    """

    def __init__(
        self,
        vocab_size: int = 65,
        block_size: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        *,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        check_positive(
            vocab_size=vocab_size, block_size=block_size, layers=layers, heads=heads, width=width
        )
        if width % heads:
            raise UserError(
                f"width={width} must be a multiple of heads={heads}, for example "
                f"{math.ceil(width / heads) * heads}."
            )
        if not 0 <= dropout < 1:
            raise UserError(f"dropout={dropout} must be from 0 to below 1.")
        self.block_size = block_size
        self.embed = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            self.start_parameter(name, parameter)
        if tied:
            self.head.weight = self.embed.weight

    def start_parameter(self, name: str, parameter: Tensor) -> None:
        """Initialise one parameter as GPT-2 does, in place.

        Deviation 0.02, and less for what is added 2 x layers times, so that the sum keeps its size
        with depth.
        """
        if parameter.dim() >= 2:
            added = name.endswith(("attn.out.weight", "mlp.down.weight"))
            nn.init.normal_(
                parameter, std=0.02 / math.sqrt(2 * len(self.layers)) if added else 0.02
            )
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.begin(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def begin(self, tokens: Tensor) -> Tensor:
        """What the first layer is given, N x T x width."""
        length = tokens.shape[1]
        if length > self.block_size:
            raise UserError(
                f"{length} tokens in a sample, but this GPT was made with "
                f"block_size={self.block_size}."
            )
        return self.dropout(
            self.embed(tokens) + self.position(torch.arange(length, device=tokens.device))
        )

    def chain(self) -> list[str | tuple[str, tuple[str, ...]]]:
        """What `forward` calls one after another, for a pipeline: names of modules, and of a method
        with what it uses."""
        layers = [f"layers.{number}" for number in range(len(self.layers))]
        return [("begin", ("embed", "position", "dropout")), *layers, "norm", "head"]


class NextToken(nn.CrossEntropyLoss):
    """The cross entropy of what `GPT` predicts: output N x T x V logits, target N x T tokens
    (int64).

    It takes torch.nn.CrossEntropyLoss's arguments; the mean is over all tokens that are not
    `ignore_index`.

    Raises `UserError` when the two do not have the same samples and positions.
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if output.shape[:-1] != target.shape:  # flattened, they might still have as many rows
            raise UserError(
                "NextToken compares N x T x V logits with N x T tokens, but the model gave "
                f"{list(output.shape)} for a target of {list(target.shape)}."
            )
        return super().forward(output.flatten(0, -2), target.flatten())
