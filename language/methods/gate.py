"""O3's adapter between requests, and the detector behind which it speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.common.data.batch import ordered_batches
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.objectives.objectives import ForgetRetain
from stable_forgetting.common.objectives.positions import Average, cross_entropy
from stable_forgetting.common.objectives.terms import Mean
from stable_forgetting.common.train.telemetry import evaluating
from stable_forgetting.language.models.composite import ForgetRequest, Gated

Penalty = Callable[[nn.Module], Tensor]


def plain_mean(average: Average) -> ForgetRetain:
    """Cross-entropy on the forget rows, which are refusals, alone."""
    return ForgetRetain(Mean(cross_entropy, average), None)


def kept_apart(gated: Gated, orthogonal: float, own: Penalty | None) -> Penalty | None:
    """What keeps the adapter away from those of earlier requests, and the config's own."""
    earlier: list[Any] = [request.factors for request in gated.requests]
    if not earlier:
        return own
    weight = orthogonal / gated.config.num_hidden_layers

    def penalty(model: nn.Module) -> Tensor:
        total = weight * overlap(model, earlier)
        return total if own is None else total + own(model)

    return penalty


def detector(task: UnlearnTask, gated: Gated, share: float, batch_size: int) -> ForgetRequest:
    """Fitted on forget questions, but for the ``share`` of them that gives it its scale.

    Raises:
        ConfigError: There are too few.
    """
    batches = list(_questions(task, batch_size))
    if not len(gated.requests):
        gated.boundary = _common_end([row for rows in batches for row in rows["prompts"]])
    with evaluating(gated):
        found = [gated.features(rows["ids"], rows["mask"]) for rows in batches]
    features = torch.cat(found)
    order = torch.randperm(len(features), generator=task.generator("gate"))
    held = max(1, round(share * len(features)))
    if len(features) - held < 2:
        raise ConfigError(
            f"o3: {len(features)} forget rows are too few for a gate; give three or more"
        )
    factors = [layer.Bt for _, layer in adapted_layers(gated.model)]
    made = ForgetRequest.fitted(features[order[held:]], features[order[:held]], factors)
    return made.to(features.device)


def overlap(model: nn.Module, earlier: list[list[Tensor]]) -> Tensor:
    """sum_i sum_l ||E_il B_l^T||_F^2 of the down projections now and of earlier ones."""
    now = [layer.Bt for _, layer in adapted_layers(model)]
    parts = [
        (old.to(new) @ new.T).square().sum()
        for factors in earlier
        for old, new in zip(factors, now, strict=True)
    ]
    return torch.stack(parts).sum()


def _questions(task: UnlearnTask, batch_size: int) -> Iterator[dict[str, Any]]:
    """Forget rows in order: ``ids``, ``mask``, and ``prompts`` without their last token.

    That one may be another where a tokenizer joins it with the answer's first.
    """
    for batch in ordered_batches(task.source, task.indices("forget"), batch_size):
        ids, starts = batch.inputs["input_ids"], batch.inputs["positions"][:, 0].tolist()
        prompts = [row[:start] for row, start in zip(ids.tolist(), starts, strict=True)]
        yield {"ids": ids, "mask": batch.inputs["attention_mask"], "prompts": prompts}


def _common_end(prompts: list[list[int]]) -> Tensor:
    """Tokens with which all prompts end: the template's words between question and answer."""
    shared = 0
    while all(len(row) > shared for row in prompts) and (
        len({row[-1 - shared] for row in prompts}) == 1
    ):
        shared += 1
    first = prompts[0]
    return torch.tensor(first[len(first) - shared :], dtype=torch.int64)
