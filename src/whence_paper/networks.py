"""Networks of the experiments on images, and of the benchmarks."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them, on flattened inputs. M1 is `mlp(784, 1024, 1024, 10)`."""
    layers: list[nn.Module] = [nn.Flatten()]
    for below, above in itertools.pairwise(sizes):
        layers += [nn.Linear(below, above), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(outputs: int, channels: tuple[int, ...] = (32, 64, 128, 256), colours: int = 1) -> nn.Sequential:
    """M2: the paper's four 3 x 3 convolutions and a linear layer.

    The paper does not say how it pools: here 2 x 2 maxima after all convolutions but the last, the mean after that.
    """
    layers: list[nn.Module] = []
    below = colours
    for above in channels:
        layers += [nn.Conv2d(below, above, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        below = above
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(below, outputs))


def tabular(inputs: int = 8, width: int = 100, outputs: int = 1) -> nn.Sequential:
    """M4: the paper's network for California housing, one hidden layer with LayerNorm."""
    return nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, outputs))


class Attention(nn.Module):
    """Self-attention written with Linear layers, which most peers can read (they refuse nn.MultiheadAttention)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width) to the same."""
        n, t, width = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return found


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(n, t, width) to the same."""
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class ViT(nn.Module):
    """M3: patches, learned positions (that of the class token serves as the token), blocks, a linear head."""

    def __init__(
        self, side: int, patch: int, colours: int, outputs: int, width: int = 128, depth: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(colours * patch * patch, width)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """(n, colours, side, side) to (n, outputs)."""
        n, c, h, w = images.shape
        p = self.patch
        cut = images.reshape(n, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(n, -1, c * p * p)
        tokens = self.embed(cut)
        tokens = torch.cat([tokens.new_zeros(n, 1, tokens.shape[2]), tokens], 1) + self.positions
        found: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return found


class Residual(nn.Module):
    """ResNet-18's basic block."""

    def __init__(self, below: int, above: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(below, above, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(above)
        self.conv2 = nn.Conv2d(above, above, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(above)
        self.short = nn.Sequential()
        if stride != 1 or below != above:
            self.short = nn.Sequential(nn.Conv2d(below, above, 1, stride, bias=False), nn.BatchNorm2d(above))

    def forward(self, x: Tensor) -> Tensor:
        """(n, below, side, side) to (n, above, side / stride, side / stride)."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.short(x))


def resnet18(outputs: int = 10, width: int = 64, colours: int = 3) -> nn.Sequential:
    """ResNet-18 for 32 x 32 images: a 3 x 3 stem, no pooling before the blocks; 11.2 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(colours, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    below = width
    for stage in range(4):
        above = width * 2**stage
        layers += [Residual(below, above, 1 if stage == 0 else 2), Residual(above, above, 1)]
        below = above
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(below, outputs))


def resnet9(outputs: int = 10, width: int = 64, colours: int = 3) -> nn.Sequential:
    """ResNet-9 for 32 x 32 images: two residual blocks between pooled convolutions; 6.6 M parameters."""

    def block(below: int, above: int, pool: bool) -> list[nn.Module]:
        layers = [nn.Conv2d(below, above, 3, padding=1, bias=False), nn.BatchNorm2d(above), nn.ReLU()]
        return [*layers, nn.MaxPool2d(2)] if pool else layers

    return nn.Sequential(
        *block(colours, width, False),
        *block(width, 2 * width, True),
        Residual(2 * width, 2 * width, 1),
        *block(2 * width, 4 * width, True),
        *block(4 * width, 8 * width, True),
        Residual(8 * width, 8 * width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, outputs),
    )


def size(network: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
