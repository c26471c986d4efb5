"""A tiny attention network for the contract checks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

CLASSES, WIDTH, TOKENS, PER_CLASS = 4, 16, 3, 36
TARGETS: Mapping[str, tuple[str, ...]] = {
    "mlp": ("blocks.*.mlp.fc1", "blocks.*.mlp.fc2"),
    "attention": ("blocks.*.attn.qkv", "blocks.*.attn.proj"),
    "all": ("blocks.*.mlp.fc*", "blocks.*.attn.*"),
}


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        out: Tensor = self.proj((query @ key.mT / WIDTH**0.5).softmax(-1) @ value)
        return out


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return out


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = _Attention(), _Mlp()
        self.drop = nn.Dropout(0.1)  # a method that depends on torch's global stream shows

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.drop(self.mlp(self.norm2(x)))
        return out


class TinyNet(nn.Module):
    """(N, TOKENS * WIDTH) vectors -> (N, CLASSES) logits; two residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Cuts each vector into tokens, mixes them, classifies their mean."""
        tokens = self.embed(x.view(len(x), TOKENS, WIDTH))
        for block in self.blocks:
            tokens = block(tokens)
        out: Tensor = self.head(self.norm(tokens.mean(dim=1)))
        return out
