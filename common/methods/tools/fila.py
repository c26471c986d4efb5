"""FILA: adapters that start on what the forget set needs most and the retain set least.

The Fisher information of forget over that of retain weighs the rows of each weight matrix; the
weighted rank-r optimum of the matrix becomes the adapter.  The published method moves it out of
the base weight, ``W_res = W - s B A``.  Here the base weight stays as it is, and the adapter
subtracts its own start instead: ``dW = s (A Bt - A0 Bt0)``.  That is the same function and the same
training, it needs no second set of base weights, and nothing is rounded away.

Source: LoKU, arXiv 2408.06621, sec. "Fisher-weighted initialization of low-rank adapters", and its
repository (measure_importance.py, forget.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.seeding import derive
from stable_forgetting.common.bounded.config import FilaConfig
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.bounded.quantised import QuantisedBoundedLinear
from stable_forgetting.common.data.batch import IGNORE, Batch
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.objectives.positions import average, cross_entropy, wide
from stable_forgetting.common.train.protocols import ModelForward
from stable_forgetting.common.train.telemetry import evaluating

logger = logging.getLogger(__name__)

QUANTILES = (0.05, 0.5, 0.95)
_SAMPLED = 1_000_000


def fisher_information(
    model: nn.Module, names: Sequence[str], forward: ModelForward, batches: Sequence[Batch]
) -> dict[str, Tensor]:
    """Weight -> (k, d) mean over positions of g_b^2, float32 or wider, in eval mode.

    g_b is the gradient of a batch's token-mean cross-entropy.
    """
    sums: dict[str, Tensor] = {}
    count = 0
    parameters = dict(model.named_parameters())
    before = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        with evaluating(model), torch.enable_grad():
            for batch in batches:
                values = cross_entropy(forward(model, batch), batch.labels)
                loss = average(values, batch.labels, "tokens")
                positions = int((batch.labels != IGNORE).sum())
                gradients = torch.autograd.grad(loss, [parameters[name] for name in names])
                for name, gradient in zip(names, gradients, strict=True):
                    squared = wide(gradient).square().mul_(positions)
                    sums[name] = sums[name].add_(squared) if name in sums else squared
                count += positions
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(before[name])
    return {name: total.div_(count) for name, total in sums.items()}


def row_weights(forget: Tensor, retain: Tensor, eps: float) -> Tensor:
    """(k,) d_i = sqrt(sum_j F_f / (eps + F_r)): one weight per output, from (k, d) Fishers."""
    return (forget / (eps + retain)).sum(1).sqrt()


class Factors(NamedTuple):
    """A (k, r) and Bt (r, d)."""

    A: Tensor
    Bt: Tensor


def weighted_factors(weight: Tensor, rows: Tensor, rank: int, *, balanced: bool = False) -> Factors:
    """The exact minimiser of ``||diag(rows) (W - A Bt)||_F`` of rank r.

    With diag(d) W = U S V^T it is A = diag(1/d) U_r sqrt(S_r), Bt = sqrt(S_r) V_r^T, so A Bt =
    W V_r V_r^T.  A is computed as W V_r / sqrt(S_r), which divides by no d: a row whose weight is
    zero is projected like the others.

    Args:
        weight: (k, d).
        rows: (k,) non-negative.
        rank: r <= min(k, d).
        balanced: Split the same product so that ||A||_F = ||Bt||_F.  The paper's split depends on
            the unit of the row weights.

    Raises:
        ConfigError: The rank is larger than a side of the weight.
    """
    if rank > min(weight.shape):
        raise ConfigError(f"adapter.rank: {rank} is larger than a layer of {tuple(weight.shape)}")
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    _, S, Vh = torch.linalg.svd(rows.to(wide).unsqueeze(1) * wide, full_matrices=False)
    S, Vh = S[:rank], Vh[:rank]
    largest = Vh.gather(1, Vh.abs().argmax(1, keepdim=True))  # an SVD leaves the signs open
    Vh = Vh * torch.where(largest < 0, -1.0, 1.0)
    root = S.sqrt()
    inverse = torch.where(S / S[0] > 1e-7, 1 / root, 0.0)
    A, Bt = wide @ Vh.mT * inverse, root.unsqueeze(1) * Vh
    if balanced:
        norm = torch.linalg.vector_norm
        ratio = (norm(Bt) / norm(A).clamp_min(1e-30)).sqrt().clamp_min(1e-30)
        return Factors(A * ratio, Bt / ratio)
    return Factors(A, Bt)


def published_factors(
    weight: Tensor, rows: Tensor, rank: int, damping: float, seed: int
) -> Factors:
    """The repository's: randomised SVD, and diag(1 / (d + damping)) U sqrt(S), sqrt(S) V^T.

    ``torch.svd_lowrank`` draws from the global stream; it is seeded here and put back.
    """
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        U, S, V = torch.svd_lowrank(rows.cpu().unsqueeze(1) * wide, q=rank)
    left = (1 / (rows.cpu() + damping)).unsqueeze(1) * U * S.sqrt()
    return Factors(left.to(weight.device), (S.sqrt().unsqueeze(1) * V.mT).to(weight.device))


def start_adapters(task: UnlearnTask, config: FilaConfig) -> dict[str, float]:
    """Sets every adapter's start from the task's forget and retain data; the function is kept.

    Each forget batch is paired with a random retain batch of the same size, so the retain Fisher
    sees as many samples as there are in the forget set.  The factors carry the ``amplitude *
    frequency`` of their layer: the part that they make up is the same for every alpha and omega
    (to first order in phi), and omega sits in A, so that the rate's division by omega means what it
    means without FILA.

    Returns:
        Log10 quantiles of the retain Fisher and the share of its entries below eps, where the
        retain set has no say; they are logged to the task's tracker too.
    """
    layers = dict(adapted_layers(task.model))
    for name, layer in layers.items():
        if isinstance(layer, QuantisedBoundedLinear):
            raise ConfigError(
                f"FILA needs the gradient of W0, which quantised layer '{name}' does not have; "
                "drop fila"
            )
    names = [f"{name}.weight" for name in layers]
    pair = {
        part: task.loader(part, batch_size=config.batch_size, augment=False, stream="fila")
        for part in ("forget", "retain")
    }
    fishers = {}
    for part, loader in pair.items():
        batches = [loader.next() for _ in range(pair["forget"].batches_per_epoch)]
        found = fisher_information(task.model, names, task.forward, batches)
        if part == "forget":  # a card holds one of them beside the model and its gradient
            found = {name: values.cpu() for name, values in found.items()}
        fishers[part] = found
    for name, layer in layers.items():
        key = f"{name}.weight"
        forget, retain = fishers["forget"][key], fishers["retain"][key]
        rows = row_weights(forget.to(retain.device), retain, config.eps)
        if not bool(rows.any()):
            continue  # nothing that forget needs: the usual start
        if config.compat == "loku":
            seed = derive(task.seed, "method", task.replicate, "fila", "svd", name)
            factors = published_factors(layer.weight, rows, layer.config.rank, config.damping, seed)
        else:
            factors = weighted_factors(
                layer.weight, rows, layer.config.rank, balanced=config.balanced
            )
        slope = layer.bound.amplitude * layer.bound.frequency
        scale = layer.config.scale
        A, Bt = factors.A * math.sqrt(scale) / slope, factors.Bt / math.sqrt(scale)
        layer.set_start_(A.to(layer.A), Bt.to(layer.Bt))
    facts = _quantiles(fishers["retain"], config.eps)
    if task.telemetry is not None and task.telemetry.tracker is not None:
        task.telemetry.tracker.scalars(0, {f"fila/{key}": value for key, value in facts.items()})
    logger.info("FILA: %s", ", ".join(f"{key} {value:.3g}" for key, value in facts.items()))
    return facts


def _quantiles(fisher: Mapping[str, Tensor], eps: float) -> dict[str, float]:
    """Of the entries of all weights together; evenly spaced ones where there are very many."""
    total = sum(values.numel() for values in fisher.values())
    below, samples = 0, []
    for values in (matrix.flatten() for matrix in fisher.values()):
        below += int((values < eps).sum())
        samples.append(values[:: max(1, total // _SAMPLED)].cpu())
    logs = torch.cat(samples).clamp_min(1e-45).log10()
    quantiles = torch.quantile(logs, logs.new_tensor(QUANTILES)).tolist()
    named = {
        f"log10_retain_fisher_q{int(100 * q)}": v for q, v in zip(QUANTILES, quantiles, strict=True)
    }
    return {**named, "log10_eps": math.log10(eps), "share_below_eps": below / total}
