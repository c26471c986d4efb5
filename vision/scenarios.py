"""From a scenario and a seed to frozen index sets over one image source.

The two "hard" scenarios need a difficulty for every training image.  It is a *proxy*: a linear
classifier on the principal components of the pixels, cross-validated, instead of an estimate over
many trained networks such as Feldman's memorisation score (arXiv 1906.05271).  It costs seconds
and never trains the network under test; what it calls memorised is what a linear model cannot
generalise to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from stable_forgetting.common.base.errors import DataError
from stable_forgetting.common.base.seeding import hash_order
from stable_forgetting.common.data.parts import EARLIER
from stable_forgetting.common.data.splits import ForgetSplit, class_forget, random_forget
from stable_forgetting.vision.config import ScenarioConfig
from stable_forgetting.vision.data.source import ImageSource

FOLDS = 5
COMPONENTS = 64
PROXY_SIDE = 16
_DIGITS = 6  # scores are rounded before ranking, so that the last bits of a solver do not matter


def make_split(source: ImageSource, scenario: ScenarioConfig, seed: int) -> ForgetSplit:
    """The index sets of one scenario and seed.

    Returns:
        Parts ``forget``, ``retain`` (together: the training pool), ``validation``, ``test``.
        When classes are forgotten, ``validation`` and ``test`` hold retained classes only, and
        ``validation_forget`` and ``test_forget`` the held-out images of the forgotten ones.

    Raises:
        DataError: The scenario does not fit the data set, or leaves a part empty.
    """
    if scenario.kind == "class":
        return _class_split(source, scenario, seed)
    assert scenario.fraction is not None
    forget = _forget_images(source, scenario.kind, scenario.fraction, seed)
    parts = {
        "forget": forget,
        "retain": np.setdiff1d(source.train_pool, forget),
        "validation": source.validation_pool,
        "test": source.test_pool,
    }
    note = f"{len(forget)} of {len(source.train_pool)} training images ({scenario.kind})"
    return _split(source, scenario.label, seed, parts, note)


def _split(
    source: ImageSource, label: str, seed: int, parts: dict[str, np.ndarray], forgotten: str
) -> ForgetSplit:
    notes = {"forgotten": forgotten, "data": source.provenance}
    name = f"{source.name}/{label}/seed-{seed}"
    return ForgetSplit(name, parts, source.digest, notes)


def _class_split(source: ImageSource, scenario: ScenarioConfig, seed: int) -> ForgetSplit:
    classes = forgotten_classes(scenario, source.num_classes, seed)
    train = source.train_pool
    gone = scenario.earlier_classes
    _check_meant((*(scenario.classes or ()), *gone), source.class_names)
    parts = {"forget": class_forget(train, source.labels, classes)}
    if gone:
        parts[EARLIER] = class_forget(train, source.labels, gone)
    parts["retain"] = np.setdiff1d(train, class_forget(train, source.labels, (*classes, *gone)))
    for part, pool in (("validation", source.validation_pool), ("test", source.test_pool)):
        parts[f"{part}_forget"] = class_forget(pool, source.labels, classes)
        parts[part] = np.setdiff1d(pool, class_forget(pool, source.labels, (*classes, *gone)))
    named = ", ".join(f"{label} ({source.class_names[label]})" for label in classes)
    noun = "class" if len(classes) == 1 else "classes"
    label = f"class-{classes[0]}" if len(classes) == 1 else scenario.label
    return _split(source, label, seed, parts, f"{noun} {named}")


def _check_meant(classes: Sequence[int], names: Sequence[str]) -> None:
    """Refuses a number that is one class's id and another one's name, as 2 is of folders 0 to 11.

    Raises:
        DataError: Naming both.
    """
    for label in classes:
        if names[label] != str(label) and str(label) in names:
            raise DataError(
                f"scenario.classes: {label} is class '{names[label]}' in the order of names, but "
                f"another is called '{label}'; rename the folders with zeros in front: {label:02}"
            )


def forgotten_classes(scenario: ScenarioConfig, num_classes: int, seed: int) -> tuple[int, ...]:
    """Class ids: those listed, else class (3 + seed) mod C, else K classes by hash order."""
    if scenario.classes is not None:
        highest = max(*scenario.classes, *scenario.earlier_classes, 0)
        if highest >= num_classes:
            raise DataError(
                f"scenario.classes: {highest} is not one of the {num_classes}"
                f" classes 0 to {num_classes - 1}"
            )
        return tuple(sorted(scenario.classes))
    count = scenario.num_classes or 1
    if count >= num_classes:
        raise DataError(f"scenario.num_classes: {count} of {num_classes} classes leaves none")
    if count == 1:
        return ((3 + seed) % num_classes,)
    chosen = hash_order(range(num_classes), seed, "classes")[:count]
    return tuple(sorted(int(label) for label in chosen))


def _forget_images(source: ImageSource, kind: str, fraction: float, seed: int) -> np.ndarray:
    train = source.train_pool
    if kind == "random":
        return random_forget(train.tolist(), fraction, seed)
    probabilities = out_of_fold_probabilities(source, seed)
    if kind == "memorised":
        score = probabilities[np.arange(len(train)), source.labels[train]]
    else:
        top = np.sort(probabilities, axis=1)
        score = top[:, -1] - top[:, -2]
    order = np.argsort(np.round(score, _DIGITS), kind="stable")
    return np.sort(train[order[: round(fraction * len(train))]])


def out_of_fold_probabilities(source: ImageSource, seed: int) -> np.ndarray:
    """Class probabilities of every training image from a model that did not see it.

    Multinomial logistic regression on at most 64 principal components of the pixels (averaged
    down to 16 x 16 px), five stratified folds drawn by ``seed``.

    Returns:
        (len(train_pool), C) float64, rows in the order of the training pool.
    """
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    features, labels = _features(source), source.labels[source.train_pool]
    folds = _stratified_folds(labels, seed)
    probabilities = np.zeros((len(labels), source.num_classes))
    for fold in range(FOLDS):
        held_out = folds == fold
        if len(np.unique(labels[~held_out])) < 2 or not held_out.any():
            raise DataError("too few training images for this scenario: raise data.train_images")
        components = min(COMPONENTS, features.shape[1], int((~held_out).sum()))
        model = make_pipeline(
            PCA(components, svd_solver="covariance_eigh"),
            LogisticRegression(max_iter=500, tol=1e-3),
        )
        model.fit(features[~held_out], labels[~held_out])
        probabilities[np.ix_(held_out, model.classes_)] = model.predict_proba(features[held_out])
    return probabilities


def _features(source: ImageSource) -> np.ndarray:
    rows = []
    for chunk in torch.from_numpy(source.train_pool).split(4096):
        images = source.native(chunk)
        side = min(PROXY_SIDE, images.shape[-1])
        rows.append(F.adaptive_avg_pool2d(images, side).flatten(1).cpu())
    return torch.cat(rows).double().numpy()


def _stratified_folds(labels: np.ndarray, seed: int) -> np.ndarray:
    """Fold number 0..4 of every row, even within each class."""
    folds = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        rows = hash_order(np.flatnonzero(labels == label), seed, "folds")
        folds[rows] = np.arange(len(rows)) % FOLDS
    return folds
