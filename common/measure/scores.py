"""Per-sample scores of one model on named parts of the data, collected in one pass.

Accuracies, membership attacks and distances to the retrained model all read the same arrays, so
no metric runs the model again and no two metrics can disagree about its outputs.  Everything but
:func:`collect` works without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from stable_forgetting.common import data
from stable_forgetting.common.base.errors import DataError, Diverged

if TYPE_CHECKING:
    from torch import Tensor


COLUMNS = ("loss", "probability", "margin", "entropy", "modified_entropy", "correct")
"""The scalar scores, in the order in which they are computed."""
ENTROPIES = ("entropy", "modified_entropy")
"""Those that read the whole softmax."""

_CHUNK_ELEMENTS = 2**25
_SCHEMA = "scores-1"
_EXTRA = "extra."


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """What one model says about one part; all arrays have length N, float32 unless said.

    Entropies and losses are in nats.  For sequences every score is the mean over the sample's
    labelled tokens.

    Attributes:
        indices: (N,) int64, where the samples sit in the data source.
        labels: (N,) int64 classes; None for sequences.
        loss: Cross-entropy, -log p_y.
        probability: p_y, the softmax probability of the true class.
        margin: log p_y - log(1 - p_y) = z_y - logsumexp over the other logits.
        entropy: -sum_c p_c log p_c; None where it was left out.
        modified_entropy: -(1 - p_y) log p_y - sum_{c != y} p_c log(1 - p_c)
            (Song and Mittal, 2021, eq. 6); None likewise.
        correct: 1 if argmax is the label, else 0; for sequences the share of correct tokens.
        probs: (N, C) softmax, or None where it was left out.
        extra: Further per-sample measurements of a benchmark by name, each (N,) or (N, K).
    """

    indices: np.ndarray
    labels: np.ndarray | None = None
    loss: np.ndarray
    probability: np.ndarray
    margin: np.ndarray
    entropy: np.ndarray | None = None
    modified_entropy: np.ndarray | None = None
    correct: np.ndarray
    probs: np.ndarray | None = None
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in self._arrays().items():
            assert len(array) == len(self.indices), f"{name} has another length than indices"

    def __len__(self) -> int:
        return len(self.indices)

    def _arrays(self) -> dict[str, np.ndarray]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        extra = {_EXTRA + name: array for name, array in values.pop("extra").items()}
        return {name: array for name, array in values.items() if array is not None} | extra

    @classmethod
    def _of_arrays(cls, arrays: Mapping[str, Any]) -> Scores:
        own = {name: array for name, array in arrays.items() if not name.startswith(_EXTRA)}
        extra = {k.removeprefix(_EXTRA): v for k, v in arrays.items() if k.startswith(_EXTRA)}
        return cls(**own, extra=extra)

    @property
    def accuracy(self) -> float:
        """Share of correct samples (or mean share of correct tokens), in percent."""
        return percent(self.correct)

    def check_finite(self) -> None:
        """Raises if any score is NaN or infinite.

        Raises:
            Diverged: The name of the first such score is in the reason.
        """
        for name, array in self._arrays().items():
            if not np.isfinite(array).all():
                raise Diverged(0, f"{name} is not finite")

    def select(self, positions: np.ndarray) -> Scores:
        """The scores at ``positions`` (int64 into 0..N-1 or a boolean mask), in that order."""
        return self._of_arrays({name: array[positions] for name, array in self._arrays().items()})


def percent(correct: np.ndarray) -> float:
    """The mean of (N,) shares, in percent."""
    return 100.0 * float(np.mean(correct, dtype=np.float64))


def without_probs(parts: Mapping[str, Scores]) -> dict[str, Scores]:
    """Part -> scores without the (N, C) softmax, most of their size."""
    return {part: replace(scores, probs=None) for part, scores in parts.items()}


def save_scores(parts: Mapping[str, Scores], path: Path) -> None:
    """Writes part -> scores as one safetensors file."""
    tensors = {
        f"{part}/{name}": np.ascontiguousarray(array)
        for part, scores in parts.items()
        for name, array in scores._arrays().items()
    }
    save_file(tensors, path, metadata={"schema": _SCHEMA})


def load_scores(path: Path) -> dict[str, Scores]:
    """Reads what :func:`save_scores` wrote, parts in alphabetical order.

    Raises:
        DataError: The file is missing, damaged or of another kind.
    """
    parts: dict[str, dict[str, Any]] = {}
    try:
        with safe_open(path, framework="np") as file:
            if (file.metadata() or {}).get("schema") != _SCHEMA:
                raise DataError(
                    f"{path}: not a scores file of this version; delete {path.parent} and rerun"
                )
            for key in sorted(file.keys()):
                part, _, name = key.rpartition("/")
                parts.setdefault(part, {})[name] = file.get_tensor(key)
        return {part: Scores._of_arrays(arrays) for part, arrays in parts.items()}
    except (SafetensorError, OSError, TypeError) as error:
        raise DataError(
            f"{path}: not readable scores ({error}); delete {path.parent} and rerun"
        ) from None


def collect(forward: data.Forward, batches: Iterable[data.Batch]) -> Scores:
    """Scores every sample once, in the order of ``batches``; of sequences without a softmax.

    Runs under ``inference_mode``; softmax is taken in float32 whatever the model computes in.
    Putting the model into eval mode is the caller's part.

    Args:
        forward: Batch -> logits, (N, C) for classes or (N, T, C) for sequences, aligned with the
            batch's labels; tokens labelled -100 are not scored.
        batches: All samples of one part.

    Raises:
        Diverged: A scored logit is NaN or infinite.
        DataError: There is no sample, or a sequence without a labelled token.
    """
    import torch

    columns, indices, labels, probs = [], [], [], []
    with torch.inference_mode():
        for batch in batches:
            logits = forward(batch)
            scored = batch.labels.to(logits.device)
            indices.append(batch.indices.cpu().numpy().astype(np.int64))
            if logits.ndim == 3:
                columns.append(_score_sequences(logits, scored, lambda z, y: _statistics(z, y)[0]))
                continue
            table, softmax = _statistics(logits, scored)
            columns.append(_checked(table))
            labels.append(batch.labels.cpu().numpy().astype(np.int64))
            probs.append(softmax.cpu().numpy())
    if not columns:
        raise DataError("there is nothing to score: the part has no samples")
    values = np.concatenate(columns).astype(np.float32)
    named: dict[str, Any] = {
        name: np.ascontiguousarray(values[:, k]) for k, name in enumerate(COLUMNS)
    }
    return Scores(
        indices=np.concatenate(indices),
        labels=np.concatenate(labels) if labels else None,
        probs=np.concatenate(probs) if probs else None,
        **named,
    )


def collect_correct(forward: data.Forward, batches: Iterable[data.Batch]) -> np.ndarray:
    """(N,) float32 ``collect(...).correct``, bit for bit, from one look at each logit.

    Raises:
        Diverged: A scored logit is NaN or infinite.
        DataError: There is no sample, or a sequence without a labelled token.
    """
    import torch

    found = []
    with torch.inference_mode():
        for batch in batches:
            logits = forward(batch)
            labels = batch.labels.to(logits.device)
            sequences = logits.ndim == 3
            table = (
                _score_sequences(logits, labels, _hits)
                if sequences
                else _checked(_hits(logits, labels))
            )
            found.append(table[:, 0])
    if not found:
        raise DataError("there is nothing to score: the part has no samples")
    return np.concatenate(found).astype(np.float32)


def _score_sequences(
    logits: Tensor, labels: Tensor, score: Callable[[Tensor, Tensor], Tensor]
) -> np.ndarray:
    """Token means per sample, float64; chunked, since vocabularies are large.

    Args:
        score: (M, C) logits and (M,) labels -> (M, columns + 1), the last one a finiteness flag.
    """
    import torch

    scored = labels != data.IGNORE
    sample, position = scored.nonzero(as_tuple=True)
    counts = np.bincount(sample.cpu().numpy(), minlength=len(labels))
    if (counts == 0).any():
        raise DataError("a sequence has no labelled token to score; drop it or lengthen max_length")
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    tables = [
        score(logits[n, t], labels[n, t])
        for n, t in zip(torch.split(sample, rows), torch.split(position, rows), strict=True)
    ]
    tokens = _checked(torch.cat(tables))
    owner = sample.cpu().numpy()
    sums = [np.bincount(owner, weights=column, minlength=len(labels)) for column in tokens.T]
    return np.asarray(np.stack(sums, axis=1) / counts[:, None])


def scores_without_entropies(logits: Tensor, labels: Tensor) -> np.ndarray:
    """(M, len(COLUMNS)) float32: the scalar scores of single predictions.

    :data:`ENTROPIES`, which cost most of the time, are NaN.

    Args:
        logits: (M, C); float32 ones are overwritten.
        labels: (M,) int64.

    Raises:
        Diverged: A logit is NaN or infinite.
    """
    return _checked(_margins(logits, labels))


def _checked(table: Tensor) -> np.ndarray:
    """The columns on the CPU, after the last one (all logits finite) was looked at."""
    array = table.cpu().numpy()
    if not array[:, -1].all():
        bad = int((array[:, -1] == 0).sum())
        raise Diverged(0, f"{bad} of {len(array)} logit rows are not finite")
    return array[:, :-1]


def _statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(M, len(COLUMNS) + 1) scores with a finiteness flag, and the (M, C) softmax.

    Loss and probability follow from the margin m (log p = -softplus(-m)), which keeps its
    resolution where the softmax saturates at 1 in float32.
    """
    import torch
    from torch.nn.functional import softplus

    assert logits.shape[-1] >= 2, "a classifier needs two classes"
    z = logits.float()
    true = labels.unsqueeze(1)
    top = z.argmax(dim=1, keepdim=True)
    margin = _margin(z, true)
    log_probs = z.log_softmax(dim=1)
    probs = log_probs.exp()
    # Only the largest p can round to 1; its log(1 - p) comes from its margin.
    log_not = torch.log1p(-probs).scatter(1, top, -softplus(_margin(z, top)))
    others = (probs * log_not).scatter(1, true, 0.0).sum(dim=1)
    columns = [
        softplus(-margin),
        torch.sigmoid(margin),
        margin,
        -(probs * log_probs).sum(dim=1, keepdim=True),
        torch.sigmoid(-margin) * softplus(-margin) - others.unsqueeze(1),
        top.eq(true).float(),
        torch.isfinite(z).all(dim=1, keepdim=True).float(),
    ]
    return torch.cat(columns, dim=1), probs


def _margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The columns of :func:`_statistics`, bit for bit, with NaN as entropies; no softmax."""
    import torch
    from torch.nn.functional import softplus

    z, true = logits.float(), labels.unsqueeze(1)
    hits, own = _hits(z, labels), z.gather(1, true)
    margin = own - z.scatter_(1, true, -float("inf")).logsumexp(dim=1, keepdim=True)
    unknown = torch.full_like(margin, float("nan"))
    likely = [softplus(-margin), torch.sigmoid(margin), margin]
    return torch.cat([*likely, unknown, unknown, hits], dim=1)


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """(M, 2): whether the argmax is the label, and whether all logits are finite."""
    import torch

    z = logits.float()
    finite = z.sum(dim=1, keepdim=True).isfinite()  # one pass; it may overflow where all is finite
    if not finite.all():
        finite = torch.isfinite(z).all(dim=1, keepdim=True)
    hits = z.argmax(dim=1, keepdim=True).eq(labels.unsqueeze(1))
    return torch.cat([hits.float(), finite.float()], dim=1)


def _margin(z: Tensor, chosen: Tensor) -> Tensor:
    """(M, 1): chosen logit minus logsumexp of all others."""
    return z.gather(1, chosen) - z.scatter(1, chosen, -float("inf")).logsumexp(dim=1, keepdim=True)


def auc(positives: np.ndarray, negatives: np.ndarray) -> float:
    """P(positive > negative), ties counted half, in percent; 50 is chance."""
    ordered = np.sort(negatives)
    below = np.searchsorted(ordered, positives, side="left")
    upto = np.searchsorted(ordered, positives, side="right")
    return 100.0 * float(np.mean(below + upto)) / (2 * len(negatives))
