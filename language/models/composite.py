"""Causal models around causal models: two that answer as one, and adapters behind a gate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stable_forgetting.common.bounded.layer import BoundedLinear, adapted_layers
from stable_forgetting.language.models.backbone import cache_input, cache_output


@dataclass
class Caches:
    """What is remembered of texts while they are continued: of every model inside, in order.

    Attributes:
        weights: (N,) how far each text's adapters speak, where they are gated.
    """

    inner: tuple[Any, ...]
    weights: Tensor | None = None

    def batch_select_indices(self, places: Tensor) -> None:
        """Drops all rows but those at (N,) places."""
        for cache in self.inner:
            cache.batch_select_indices(places)
        self.weights = None if self.weights is None else self.weights[places]


@dataclass
class CompositeOutput:
    """What a causal model returns, as far as this project reads it."""

    logits: Tensor
    past_key_values: Caches | None


class LogitDifference(nn.Module):
    """v_b - a ReLU(v_r - v_b), v the logits of a baseline and of a reinforced model.

    Takes what either model takes.  It has no single head behind one decoder, and says so: its
    output embeddings are None, so that whoever asks runs it whole.

    Args:
        baseline: The model before reinforcement.
        reinforced: The same architecture, fine-tuned on what is to be forgotten.
        a: How much of what reinforcement raised is taken off.  Of several the chosen one is stored
            with the weights.
    """

    a: float | Tensor

    def __init__(self, baseline: nn.Module, reinforced: nn.Module, a: float | Sequence[float]):
        super().__init__()
        self.baseline, self.reinforced = baseline, reinforced
        if isinstance(a, float):
            self.a = a
        else:
            self.register_buffer("a", torch.tensor(a[-1]))

    def take_off(self, a: float) -> None:
        """Sets how much is taken off."""
        self.a = a if isinstance(self.a, float) else self.a.fill_(a)

    @property
    def config(self) -> Any:
        """Of the baseline."""
        return self.baseline.config

    @property
    def generation_config(self) -> Any:
        """Of the baseline."""
        return getattr(self.baseline, "generation_config", None)

    def get_output_embeddings(self) -> None:
        """No linear map makes these logits."""

    def forward(self, *args: Any, past_key_values: Caches | None = None, **inputs: Any) -> Any:
        """Logits of both, combined; where the models return plain logits, so does this."""
        caches: list[dict[str, Any]] = [{}, {}]
        if past_key_values is not None:
            models = self.baseline, self.reinforced
            caches = [cache_input(*p) for p in zip(models, past_key_values.inner, strict=True)]
        one = self.baseline(*args, **inputs, **caches[0])
        two = self.reinforced(*args, **inputs, **caches[1])
        if isinstance(one, Tensor):
            return self._combined(one, two)
        first = cache_output(one)
        remembered = None if first is None else Caches((first, cache_output(two)))
        return CompositeOutput(self._combined(one.logits, two.logits), remembered)

    def _combined(self, baseline: Tensor, reinforced: Tensor) -> Tensor:
        return baseline - self.a * F.relu(reinforced - baseline)


class LogitSubtraction(LogitDifference):
    """v_b - a v_r where the baseline's answer may be v, v_b elsewhere.

    Args:
        reinforced: Any causal model with the same vocabulary.
        a: How much of its logits is taken off.
        share: Answers count that are at least as likely as the likeliest, times this; and this
            share of the vocabulary, rounded down to one at least, in any case.
    """

    def __init__(self, baseline: nn.Module, reinforced: nn.Module, a: float, share: float):
        super().__init__(baseline, reinforced, a)
        self.share = share

    def _combined(self, baseline: Tensor, reinforced: Tensor) -> Tensor:
        if not self.share:
            return baseline - self.a * reinforced
        kept = max(1, int(self.share * baseline.shape[-1]))
        least = baseline.amax(-1, keepdim=True) + math.log(self.share)
        least = torch.minimum(least, baseline.topk(kept, dim=-1).values[..., -1:])
        return baseline - self.a * torch.where(baseline >= least, reinforced, 0.0)


COSINE = 1000.0
"""Weight of the nearest neighbour beside half a Mahalanobis distance, in a layer's score."""
FULL, NONE = 0.32, 0.2
"""Of a sigmoid: from where on the adapters speak fully, and below which they are silent."""


class ForgetRequest(nn.Module):
    """What is kept of one request: who belongs to it, and the factors that its adapter ended with.

    Buffers: ``seen`` (L, n, H) unit features of the texts that it was fitted on, ``center`` (L, H)
    and ``whitening`` (L, k, H) of their Gaussian, ``plane`` (L + 1,) of the one-class SVM (offset
    last), ``spread`` (3,): mean score of fitted texts, mean and deviation of held-out ones, and
    ``factor_<i>`` (r, d) of the i-th adapted layer.
    """

    seen: Tensor
    center: Tensor
    whitening: Tensor
    plane: Tensor
    spread: Tensor

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @classmethod
    def fitted(cls, shown: Tensor, held: Tensor, factors: Sequence[Tensor]) -> ForgetRequest:
        """A detector of texts like some (O3, arXiv 2407.10223).

        Args:
            shown: (n, L, H) features of texts that it is fitted on, n >= 2.
            held: (m, L, H) features of others of the request, from which the scale is taken.
            factors: Of each adapted layer.
        """
        from sklearn.svm import OneClassSVM

        shown, held = shown.float().cpu(), held.float().cpu()
        center = shown.mean(0)
        _, sizes, axes = torch.linalg.svd((shown - center).transpose(0, 1), full_matrices=False)
        real = sizes > 1e-6 * sizes[:, :1].clamp_min(1e-12)
        scale = torch.where(real, len(shown) ** 0.5 / sizes.clamp_min(1e-12), 0.0)
        made = {
            "seen": F.normalize(shown, dim=-1).transpose(0, 1).contiguous(),
            "center": center,
            "whitening": scale[..., None] * axes,
        }
        layers = cls({**made, "plane": torch.zeros(0), "spread": torch.zeros(3)})
        scores = layers.scores(shown).double().numpy()
        state = np.random.get_state()  # noqa: NPY002 - the solver is seeded from it
        try:
            svm = OneClassSVM(nu=0.01, kernel="linear").fit(scores)
        finally:
            np.random.set_state(state)  # noqa: NPY002
        plane = torch.tensor([*svm.coef_[0], *svm.intercept_], dtype=torch.float32)
        layers.plane = plane
        inner, outer = layers.decision(shown), layers.decision(held)
        spread = [inner.mean(), outer.mean(), outer.std(correction=0).clamp_min(1e-6)]
        named = {f"factor_{i}": factor.detach().clone() for i, factor in enumerate(factors)}
        return cls({**made, "plane": plane, "spread": torch.stack(spread), **named})

    @property
    def factors(self) -> list[Tensor]:
        """(r, d) of each adapted layer."""
        names = [name for name in self._buffers if name.startswith("factor_")]
        return [self.get_buffer(f"factor_{i}") for i in range(len(names))]

    def scores(self, features: Tensor) -> Tensor:
        """(N, L): -1000 of the largest cosine to a fitted text, less half of a squared distance."""
        nearest = torch.einsum("nlh,lkh->nlk", F.normalize(features, dim=-1), self.seen).amax(-1)
        moved = torch.einsum("nlh,lkh->nlk", features - self.center, self.whitening)
        return -COSINE * nearest - 0.5 * moved.square().sum(-1)

    def decision(self, features: Tensor) -> Tensor:
        """(N,) of the one-class SVM on the layers' scores."""
        return self.scores(features) @ self.plane[:-1] + self.plane[-1]

    def forward(self, features: Tensor) -> Tensor:
        """(N,) in [0, 1]: how far texts belong to the request, of (N, L, H) features."""
        x, (inner, outer, deviation) = self.decision(features), self.spread
        tails = [
            sum(torch.special.ndtr((place - mean) / deviation) for mean in (inner, outer)) / 2
            for place in (x, inner + outer - x)
        ]
        belongs = torch.sigmoid(10 * (1 - (tails[0] - tails[1]).abs()) - 2)
        between = torch.where(belongs > NONE, 10 * belongs.square(), torch.zeros_like(belongs))
        return torch.where(belongs >= FULL, torch.ones_like(belongs), between)


class Gated(nn.Module):
    """h = W0 x + w(text) dW x: adapters scaled by the request that a text belongs to most.

    The gate reads what stands before the answer, in the hidden states of the model without
    adapters: the part of a row in front of ``boundary``, the whole row where that is not in it.
    Inside, ``model`` has its adapters fully on.  It says that it has no output embeddings, so that
    whoever asks runs it whole, and takes one answer per row.

    Args:
        model: A causal model of transformers with adapters attached.
    """

    packable = False
    boundary: Tensor

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.requests = nn.ModuleList()
        self.register_buffer("boundary", torch.zeros(0, dtype=torch.int64))
        self._weights: Tensor | None = None
        for _, layer in adapted_layers(model):
            layer.register_forward_hook(self._scaled)

    @property
    def config(self) -> Any:
        """Of the model."""
        return self.model.config

    @property
    def generation_config(self) -> Any:
        """Of the model."""
        return getattr(self.model, "generation_config", None)

    def get_output_embeddings(self) -> None:
        """No decoder and head without a gate."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Caches | None = None,
        **inputs: Any,
    ) -> CompositeOutput:
        """Logits; a continued text keeps the weight that its beginning has."""
        if past_key_values is None:
            weights, inner = self.weigh(input_ids, attention_mask), None
        else:
            assert past_key_values.weights is not None
            weights, (inner,) = past_key_values.weights, past_key_values.inner
        given = {"attention_mask": attention_mask, **cache_input(self.model, inner), **inputs}
        with self._speaking(weights):
            out = self.model(input_ids=input_ids, **given)
        remembered = cache_output(out)
        cache = None if remembered is None else Caches((remembered,), weights)
        return CompositeOutput(out.logits, cache)

    def weigh(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """(N,) w of each text: the largest of all requests; 0 before the first."""
        if not len(self.requests):
            return torch.zeros(len(ids), device=ids.device)
        features = self.features(ids, mask)
        return torch.stack([request(features) for request in self.requests]).amax(0)

    @torch.no_grad()
    def features(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """(N, L, H) mean hidden states of what stands before the answer, a row per block."""
        seen = torch.ones_like(ids) if mask is None else mask
        inside = self._question(ids, seen)
        places = (seen.cumsum(1) - 1).clamp_min(0)
        with self._speaking(torch.zeros(len(ids), device=ids.device)):
            out = self.model.base_model(
                input_ids=ids,
                attention_mask=seen,
                position_ids=places,
                output_hidden_states=True,
                use_cache=False,
            )
        share = (inside / inside.sum(1, keepdim=True)).float()
        states = [h.float() for h in out.hidden_states[1:]]  # each on the device of its block
        means = [torch.einsum("nth,nt->nh", h, share.to(h.device)) for h in states]
        return torch.stack([mean.to(ids.device) for mean in means], dim=1)

    def _question(self, ids: Tensor, seen: Tensor) -> Tensor:
        """(N, T): 1 where the gate reads."""
        inside, mark = seen.clone(), self.boundary.tolist()
        for row, tokens in enumerate(ids.tolist()):
            first = int(seen[row].argmax())
            places = range(first + 1, len(tokens) - len(mark) + 1) if mark else ()
            end = next((p for p in places if tokens[p : p + len(mark)] == mark), len(tokens))
            inside[row, end:] = 0
        return inside

    @contextlib.contextmanager
    def _speaking(self, weights: Tensor) -> Iterator[None]:
        """Adapters are scaled inside."""
        self._weights = weights
        try:
            yield
        finally:
            self._weights = None

    def _scaled(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
        if self._weights is None:
            return None
        assert isinstance(layer, BoundedLinear)
        plain = F.linear(inputs[0], layer.weight, layer.bias)
        weights = self._weights.to(output).view(-1, *[1] * (output.ndim - 1))
        return plain + weights * (output - plain)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any
    ) -> None:
        """Makes room for as many requests as were stored."""
        stored: dict[int, dict[str, Tensor]] = {}
        for name, tensor in state_dict.items():
            if name.startswith(f"{prefix}requests."):
                number, _, buffer = name.removeprefix(f"{prefix}requests.").partition(".")
                stored.setdefault(int(number), {})[buffer] = torch.empty_like(tensor)
        self.requests = nn.ModuleList(ForgetRequest(stored[number]) for number in sorted(stored))
        self.requests.to(self.boundary.device)
        self.boundary = torch.empty_like(state_dict[f"{prefix}boundary"])
        super()._load_from_state_dict(state_dict, prefix, *args)
