"""Fast-NTK: exact unlearning of a linearised model, in closed form."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from stable_forgetting.common import data
from stable_forgetting.common.base.config import Strict
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.numbers import Count, Positive
from stable_forgetting.common.base.seeding import derive, hash_order
from stable_forgetting.common.methods import tools
from stable_forgetting.common.methods.base import BOTH, MethodInfo, UnlearningMethod
from stable_forgetting.common.methods.task import UnlearnTask

if TYPE_CHECKING:
    from torch import Tensor, nn


class FastNTK(UnlearningMethod):
    """Fast-NTK: move by the difference of two ridge solutions of the linearised model.

    Formula: with J the Jacobian of the logits by the chosen parameters at Original's w, one row per
    (sample, class), ``y`` centred one-hot labels times ``label_scale``, and the residual at the
    start w0 of the linear model, ``e = y - f_w + J (w - w0)``:
    ``theta(S) = J_S^T (J_S J_S^T + mu I)^-1 e_S``;  ``w <- w - scale (theta(D) - theta(D_r))``.
    That is Golatkar's update and, on a linear model trained with squared loss, exact retraining.
    mu = ``ridge`` times the mean squared row norm.  The smaller of the two equivalent systems (rows
    or parameters) is solved, in float64; where no parameter acts on two outputs, as in a classifier
    alone, each output's system by itself.
    Source: Fast-NTK (arXiv 2312.14923); Golatkar et al. 2020 (arXiv 2003.02960).  The
    paper linearises prompts or norms before they are trained; Original here is trained in full, so
    the default takes the classifier, which starts at zero (``start: zero``) and in which the logits
    are linear.  ``parameters`` takes any other patterns.

    Deviations: on a linear model ``scale`` 1 is exact, and the default.  Golatkar's factor is a
    geometric estimate of how far a non-linear model is off, which SSD's repository takes, too:
    sweep ``scale`` in {0.3, 1, 3, 10} beside ``ridge``.  ``samples`` are drawn, not all.
    Only what ``parameters`` names counts as trained: the head, 0.5 to 2 % of a small ViT.

    Rows: ``samples`` x ``classes`` (all classes when absent, else the true one and random others).
    Memory: rows x parameters x 4 bytes.
    """

    info = MethodInfo(
        2, "Fast-NTK, 2023 (arXiv 2312.14923); Golatkar et al. 2020 (arXiv 2003.02960)", BOTH
    )

    class Config(Strict):
        """Settings of Fast-NTK.

        Attributes:
            parameters: Glob patterns of the weights that move; the classifier when absent.
            start: Where the linear model starts: at zero (the default, exact for a classifier) or
                at Original.
            samples: How many of both sets are used, in their proportion; 512, for memory's sake.
            classes: Outputs per sample, the true one and random others; all when absent.
            ridge: Regularisation, as a multiple of the mean squared row norm; 1e-3 is ours.
            scale: Length of the move; 1, which is exact on a linear model.
            label_scale: Factor of the centred one-hot labels; fitted to Original's logits when
                absent.
            batch_size: Samples per forward pass; it changes no number but by rounding.
            chunk: Gradients taken at once; it changes memory and speed alone.
        """

        parameters: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
        start: Literal["zero", "current"] = "zero"
        samples: Count = 512
        classes: Count | None = None
        ridge: Positive = 1e-3
        scale: Positive = 1.0
        label_scale: Positive | None = None
        batch_size: Count = 64
        chunk: Count = 8

    def unlearn(self, task: UnlearnTask) -> nn.Module:
        """Solves twice and moves once."""
        import torch

        config: Any = self.config
        patterns = config.parameters or tuple(task.family.head)
        for name, parameter in task.model.named_parameters():  # the named move, frozen or not
            parameter.requires_grad_(any(fnmatch.fnmatch(name, each) for each in patterns))
        gradients = tools.SampleGradients(task, patterns, chunk=config.chunk)
        forget, retain = self._draw(task)
        rows, logits, labels, outputs = self._rows(task, gradients, (forget, retain))
        first = len(rows) // (len(forget) + len(retain)) * len(forget)
        fitted = (logits @ labels) / (labels @ labels).clamp_min(1e-12)  # least squares
        scale = config.label_scale or float(fitted)
        w = gradients.flat().double()
        residual = scale * labels - logits
        if config.start == "zero":
            residual = residual + times(rows, w)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        mu = config.ridge * float(norms.square().mean())
        everything = ridge_solution(rows, residual, mu, outputs)
        without = ridge_solution(rows[first:], residual[first:], mu, outputs[first:])
        gradients.write((w - config.scale * (everything - without)).to(gradients.flat().dtype))
        return task.model

    def _draw(self, task: UnlearnTask) -> tuple[np.ndarray, np.ndarray]:
        """At most ``samples`` indices, forget and retain in their own proportion."""
        forget, retain = task.indices("forget"), task.indices("retain")
        keep = min(1.0, self.config.samples / (len(forget) + len(retain)))
        seed = derive(task.seed, "fast_ntk", task.replicate)
        parts = []
        for name, indices in (("forget", forget), ("retain", retain)):
            order = hash_order(indices.tolist(), seed, name)
            parts.append(order[: max(1, round(keep * len(indices)))])
        return parts[0], parts[1]

    def _rows(
        self, task: UnlearnTask, gradients: tools.SampleGradients, parts: Sequence[np.ndarray]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of all (sample, class) pairs of the parts: Jacobian rows (R, P), logits (R,) and centred
        one-hot labels (R,) in float64, classes (R,)."""
        import torch
        import torch.nn.functional as F

        rows: Any = None
        values, targets, outputs = [], [], []
        filled = 0
        for indices in parts:
            stream = task.generator("fast_ntk", "classes", len(indices))
            for batch in data.ordered_batches(task.source, indices, self.config.batch_size):
                with torch.no_grad():
                    logits = task.forward(task.model, batch)
                if logits.ndim != 2:
                    raise ConfigError("fast_ntk linearises classifiers with one label per sample")
                wanted = self._outputs(batch.labels, logits.shape[1], stream)
                for part in gradients.jacobians(batch, wanted):
                    jacobian = part.flatten(0, 1)
                    if rows is None:
                        count = sum(map(len, parts)) * wanted.shape[1]
                        rows = jacobian.new_empty(count, jacobian.shape[1])
                    rows[filled : filled + len(jacobian)] = jacobian
                    filled += len(jacobian)
                one_hot = F.one_hot(batch.labels, logits.shape[1]).double() - 1 / logits.shape[1]
                values.append(logits.gather(1, wanted).flatten().double())
                targets.append(one_hot.gather(1, wanted).flatten())
                outputs.append(wanted.flatten())
        return rows, torch.cat(values), torch.cat(targets), torch.cat(outputs)

    def _outputs(self, labels: Tensor, num_classes: int, stream: Any) -> Tensor:
        """(N, K) classes whose logits are used: the true one first, then others at random."""
        import torch

        keys = torch.rand(len(labels), num_classes, generator=stream).to(labels.device)
        keys.scatter_(1, labels.unsqueeze(1), -1.0)
        count = min(self.config.classes or num_classes, num_classes)
        return keys.argsort(dim=1)[:, :count]


def times(rows: Tensor, vector: Tensor) -> Tensor:
    """(R,) rows @ vector in float64, some columns at a time."""
    width = _width(rows)
    pairs = zip(rows.split(width, dim=1), vector.split(width), strict=True)
    return sum((part.double() @ piece for part, piece in pairs), start=rows.new_zeros(1).double())


def ridge_solution(
    rows: Tensor, residual: Tensor, mu: float, outputs: Tensor | None = None
) -> Tensor:
    """(P,) the minimiser of ``||rows theta - residual||^2 + mu ||theta||^2``, in float64.

    Args:
        rows: (R, P).
        residual: (R,).
        mu: Positive.
        outputs: (R,) class of each row; the system falls apart where classes share no column.
    """
    theta = rows.new_zeros(rows.shape[1]).double()
    parts = None if outputs is None else separate(rows, outputs)
    if parts is None:
        return _solved(rows, residual, mu)
    for members, columns in parts:
        theta[columns] = _solved(rows[members][:, columns], residual[members], mu)
    return theta


def separate(rows: Tensor, outputs: Tensor) -> list[tuple[Tensor, Tensor]] | None:
    """(row indices, column indices) of every class; None where two classes share a column."""
    owners = rows.new_zeros(rows.shape[1]).int()
    parts = []
    for output in outputs.unique():
        members = (outputs == output).nonzero().squeeze(1)
        touched = rows[members].ne(0).any(dim=0)
        owners += touched
        if bool((owners > 1).any()):
            return None
        parts.append((members, touched.nonzero().squeeze(1)))
    return parts


def _solved(rows: Tensor, residual: Tensor, mu: float) -> Tensor:
    import torch

    count, size = rows.shape
    if size <= count:
        wide = rows.double()
        gram = wide.T @ wide + mu * torch.eye(size, dtype=torch.float64, device=rows.device)
        theta: Tensor = torch.linalg.solve(gram, wide.T @ residual)
        return theta
    kernel = mu * torch.eye(count, dtype=torch.float64, device=rows.device)
    for part in rows.split(_width(rows), dim=1):
        wide = part.double()
        kernel += wide @ wide.T
    weights = torch.linalg.solve(kernel, residual)
    return torch.cat([part.double().T @ weights for part in rows.split(_width(rows), dim=1)])


def _width(rows: Tensor) -> int:
    """Columns of which a float64 copy takes half a gigabyte."""
    return max(1, (1 << 26) // max(len(rows), 1))
