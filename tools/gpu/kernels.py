"""The bounded layer on the device against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from stable_forgetting.common.base.seeding import generator
from stable_forgetting.common.bounded import product as bounded_product
from stable_forgetting.common.bounded.phi import PHIS, Bound
from stable_forgetting.common.bounded.product import bounded_linear
from tools.gpu.items import Job, Row
from tools.perf.measure import relative_difference

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIMITS = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""Of relative Frobenius errors: the products' rounding, whose sums are float32."""
RANKS = (4, 8, 16, 32)
SHAPE, TINY_SHAPE = (1000, 520, 777), (20, 12, 9)
"""(k, d, tokens): no multiples of a tile."""


def errors(job: Job) -> Iterator[Row]:
    """One row per phi, rank and type, float32 products without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = TINY_SHAPE if job.tiny else SHAPE
    for phi, rank, (name, dtype) in product(PHIS, RANKS, TYPES.items()):
        bound = Bound(phi, outer=0.7, inner=1.3, clip=0.6)
        draws = _operands(shape, rank, dtype)
        wanted = _results({key: value.double() for key, value in draws.items()}, bound)
        placed = {key: value.to(job.device) for key, value in draws.items()}
        path = bounded_product._kernels(placed["A"], dtype).__name__.rpartition(".")[2]
        made = _results(placed, bound)
        far = {key: relative_difference(made[key].cpu(), wanted[key]) for key in wanted}
        again = _results(placed, bound)
        same = all(torch.equal(made[key], again[key]) for key in made)
        ok = same and max(far.values()) <= LIMITS[name]
        yield {"phi": phi, "rank": rank, "type": name, "path": path, **far, "same bits": same} | {
            "limit": LIMITS[name],
            "ok": ok,
        }


def _operands(shape: tuple[int, int, int], rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Operands in ``dtype``, factors in float32, as in a training in mixed precision."""
    k, d, tokens = shape
    stream = generator(0, "gpu", "kernels", rank)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=stream)

    operands = {"x": draw(tokens, d), "weight": draw(k, d), "g": draw(tokens, k)}
    factors = {"A": 2 * draw(k, rank) / rank**0.5, "Bt": draw(rank, d)}
    return {**{key: value.to(dtype) for key, value in operands.items()}, **factors}


def _results(given: dict[str, Tensor], bound: Bound) -> dict[str, Tensor]:
    """Output and gradients by way of autograd."""
    names = ("x", "A", "Bt")
    leaves: dict[str, Any] = {key: given[key].detach().requires_grad_() for key in names}
    y = bounded_linear(leaves["x"], given["weight"], None, leaves["A"], leaves["Bt"], bound)
    gradients = torch.autograd.grad(y, list(leaves.values()), given["g"])
    return {"y": y.detach(), **{f"d{key}": g for key, g in zip(names, gradients, strict=True)}}
