"""Errors of the Triton kernels in their interpreter, as JSON; a process of its own runs this.

``TRITON_INTERPRET=1`` must be set before Triton is imported, and stays for the whole process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from stable_forgetting.common.bounded import triton as ours
from stable_forgetting.common.bounded.eager import Update
from stable_forgetting.common.bounded.phi import Bound
from stable_forgetting.common.bounded.product import bounded_linear

SMALL = ours.Tiles(32, 16)
OTHER = ours.Tiles(16, 32)
PHI = ("sine", "tanh", "sigmoid", "relu", "clip")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def bound(phi: str) -> Bound:
    return Bound(phi, amplitude=0.7, frequency=1.3, clip=0.6)


def problem(k: int, d: int, tokens: int, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Operands in ``dtype``, factors in float32; arguments of phi span several radians."""
    stream = torch.Generator().manual_seed(k * 1000 + d * 10 + rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream)

    return {
        "weight": draw(k, d).to(dtype),
        "A": draw(k, rank) * 2 / rank**0.5,
        "Bt": draw(rank, d),
        "A0": draw(k, rank) / rank**0.5,
        "Bt0": draw(rank, d),
        "g": draw(tokens, k).to(dtype),
        "x": draw(tokens, d).to(dtype),
    }


def reference_delta(A: Tensor, Bt: Tensor, form: Bound) -> Tensor:
    return form.amplitude * form.value(form.frequency * (A @ Bt))


def reference(p: dict[str, Tensor], form: Bound) -> dict[str, Tensor]:
    """Everything in float64 by torch's own autograd."""
    wide = {name: tensor.double() for name, tensor in p.items()}
    A, Bt = wide["A"].requires_grad_(), wide["Bt"].requires_grad_()
    delta = reference_delta(A, Bt, form)
    exact, rounded = wide["g"].mT @ wide["x"], (p["g"].mT @ p["x"]).double()
    factors = (A, Bt)
    dA, dBt = torch.autograd.grad(delta, factors, exact, retain_graph=True)
    dA_rounded, dBt_rounded = torch.autograd.grad(delta, factors, rounded)
    start = reference_delta(wide["A0"], wide["Bt0"], form)
    delta = delta.detach()
    return {
        "W": wide["weight"] + delta,
        "dW": delta,
        "W from a start": wide["weight"] + delta - start,
        "dA": dA,
        "dBt": dBt,
        "dA of a rounded G": dA_rounded,
        "dBt of a rounded G": dBt_rounded,
    }


def error(ours: Tensor, wanted: Tensor) -> float:
    return float((ours.double() - wanted).norm() / wanted.norm())


def one(
    phi: str, dtype: torch.dtype, shape: tuple[int, int, int, int], tiles: ours.Tiles
) -> dict[str, float]:
    p, form = problem(*shape, dtype), bound(phi)
    wanted = reference(p, form)
    update = Update(p["A"], p["Bt"], form)
    started = update._replace(start=(p["A0"], p["Bt0"]))
    dA, dBt = ours.contract(p["g"], p["x"], update, tiles=tiles)
    found = {
        "W": ours.build_weight(p["weight"], update, dtype, tiles=tiles),
        "dW": ours.build_weight(None, update, torch.float32, tiles=tiles),
        "W from a start": ours.build_weight(p["weight"], started, dtype, tiles=tiles),
        "dA": dA,
        "dBt": dBt,
        "dA of a rounded G": dA,
        "dBt of a rounded G": dBt,
    }
    assert found["W"].dtype == dtype and dA.dtype == dBt.dtype == torch.float32
    return {name: error(found[name], wanted[name]) for name in wanted}


def every_case() -> dict[str, dict[str, float]]:
    """Every phi x dtype on odd shapes; ranks, tiles and the length of strips vary along."""
    found = {}
    for place, phi in enumerate(PHI):
        for name, dtype in DTYPES.items():
            rank = (1, 4, 8, 32)[(place + (name == "bfloat16")) % 4]
            shape = (37, 53, 29, rank)
            tiles = (SMALL, OTHER)[place % 2]
            with mock.patch.object(ours, "PROGRAMS", 1 + 5 * (place % 3)):
                found[f"{phi} {name}"] = one(phi, dtype, shape, tiles)
    for rank in (1, 4, 8, 32):
        found[f"rank {rank}"] = one("sine", torch.float32, (33, 17, 41, rank), SMALL)
    found["one token"] = one("sine", torch.float32, (5, 3, 1, 2), SMALL)
    return found | wide_ranks()


def wide_ranks() -> dict[str, dict[str, float]]:
    """The path of ranks that the kernels do not take, its bodies uncompiled; several row blocks."""
    shape = (37, 53, 29, ours.MAX_RANK + 1)
    with mock.patch.multiple(ours, _fused=lambda body: body, ROW_BLOCK=16):
        return {f"compiled {phi}": one(phi, torch.float32, shape, SMALL) for phi in PHI}


def through_the_layer() -> dict[str, float]:
    """Forward and gradients by way of autograd: that the layer finds these kernels."""
    p, form = problem(40, 24, 12, 4, torch.float32), bound("sine")
    wanted = reference(p, form)
    A, Bt = p["A"].requires_grad_(), p["Bt"].requires_grad_()
    x = p["x"].view(3, 4, 24).requires_grad_()
    with mock.patch.object(ours, "contract", wraps=ours.contract) as called:
        y = bounded_linear(x, p["weight"], None, A, Bt, form)
        found = torch.autograd.grad(y, (x, A, Bt), p["g"].view(3, 4, 40))
    assert called.call_count == 1, "the eager path ran"
    dx = p["g"].double() @ wanted["W"]
    return {
        "y": error(y.flatten(0, 1), p["x"].double() @ wanted["W"].mT),
        "dx": error(found[0].flatten(0, 1), dx),
        "dA": error(found[1], wanted["dA"]),
        "dBt": error(found[2], wanted["dBt"]),
    }


def given_weight_stays(p: dict[str, Tensor], form: Bound) -> bool:
    """The layer's own merged weight makes room for G, one that others hold does not."""
    A, Bt, x = (p[name].clone().requires_grad_() for name in ("A", "Bt", "x"))
    built = ours.build_weight(p["weight"], Update(p["A"], p["Bt"], form), torch.float32)
    kept, found = built.clone(), []
    for given in (None, built):
        y = bounded_linear(x, p["weight"], None, A, Bt, form, built=given)
        found.append(torch.autograd.grad(y, (x, A, Bt), p["g"]))
    return torch.equal(built, kept) and all(map(torch.equal, *found))


def near_zero() -> float:
    """Worst relative error of odd phi over arguments from 1e-6 to 20, each its own entry."""
    z = torch.logspace(-6, 1.3, 200)
    A, Bt = z[:, None].contiguous(), torch.ones(1, 16)
    worst = 0.0
    for phi in ("tanh", "sigmoid"):
        update = Update(A, Bt, Bound(phi, 1.0, 1.0))
        found = ours.build_weight(None, update, torch.float32, tiles=SMALL)
        wanted = Bound(phi, 1.0, 1.0).value(z.double())
        worst = max(worst, float(((found[:, 0].double() - wanted) / wanted).abs().max()))
    return worst


def equalities() -> dict[str, bool]:
    """What must hold bit by bit, and strides."""
    p, form = problem(37, 53, 29, 4, torch.float32), bound("sine")
    update = Update(p["A"], p["Bt"], form)

    def contract(g: Tensor, x: Tensor, **options: Any) -> list[Tensor]:
        return list(ours.contract(g, x, update, tiles=SMALL, **options))

    def same(first: list[Tensor], second: list[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    usual = contract(p["g"], p["x"])
    strided = contract(p["g"].mT.contiguous().mT, p["x"].mT.contiguous().mT)
    inside = contract(p["g"], p["x"], room=torch.full((37, 53), torch.nan))
    build = {"dtype": torch.float32, "tiles": SMALL}
    merged = ours.build_weight(p["weight"], update, **build)
    turned = ours.build_weight(p["weight"].mT.contiguous().mT, update, **build)
    alone = ours.contract(p["g"], p["x"], update, need_A=False, tiles=SMALL)
    return {
        "same bits twice": same(usual, contract(p["g"], p["x"])),
        "any strides": same(usual, strided) and torch.equal(merged, turned),
        "in given room": same(usual, inside),
        "a weight of others stays": given_weight_stays(p, form),
        "contiguous": merged.is_contiguous() and turned.is_contiguous(),
        "only what is wanted": alone[0] is None and alone[1] is not None,
        "available": ours.available(p["g"]) and not ours.available(p["g"].double()),
    }


def main() -> None:
    torch.set_num_threads(1)
    found = {"errors": every_case(), "near zero": near_zero(), "equalities": equalities()}
    found["layer"] = through_the_layer()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
