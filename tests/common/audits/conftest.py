"""Scores made by hand, and a task around the toy problem of the contract checks."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from stable_forgetting.common.audits.base import AuditTask
from stable_forgetting.common.checks import tiny_task
from stable_forgetting.common.data.batch import ordered_batches
from stable_forgetting.common.measure.scores import Scores, collect
from stable_forgetting.common.methods.base import train_reference


@pytest.fixture(scope="session")
def make_scores():
    """Scores of given probabilities (N, C) or of given margins (N,)."""

    def make(probs=None, labels=None, margin=None, indices=None) -> Scores:
        n = len(margin if probs is None else probs)
        labels = np.zeros(n, dtype=np.int64) if labels is None else np.asarray(labels)
        correct = np.ones(n, dtype=np.float32)
        if probs is not None:
            probs = np.asarray(probs, dtype=np.float64)
            p = probs[np.arange(n), labels]
            correct = (probs.argmax(axis=1) == labels).astype(np.float32)
            if margin is None:
                with np.errstate(divide="ignore"):
                    margin = np.clip(np.log(p) - np.log1p(-p), -50, 50)
        flat = np.zeros(n, dtype=np.float32)
        return Scores(
            indices=np.arange(n) if indices is None else np.asarray(indices),
            labels=labels,
            loss=flat,
            probability=flat,
            margin=np.asarray(margin, dtype=np.float64),
            entropy=flat,
            modified_entropy=flat,
            correct=correct,
            probs=probs,
        )

    return make


@pytest.fixture(scope="session")
def toy():
    """Makes an audit task of the toy problem (class 1 of 4 forgotten) around a model."""
    access = frozenset({"forget", "retain", "initial"})

    def reference(scenario: str, parts: list[str]):
        model = tiny_task.problem_of("").net()
        task = tiny_task.problem_of("").task(model, scenario, 0, access)
        return train_reference(task, parts).eval()

    models = {
        "original": reference("class", ["forget", "retain"]),
        "retrain": reference("class", ["retain"]),
    }

    def make(model=None, *, scenario="class", adapted=False, **over) -> AuditTask:
        problem = tiny_task.problem_of("")
        source = problem.source()
        stored = models["original"] if model is None else model

        def scores(net, indices):
            net.eval()
            batches = ordered_batches(source, indices, 32)
            return collect(lambda batch: problem.forward(net, batch), batches)

        fields = {
            "load": lambda: copy.deepcopy(stored),
            "load_original": lambda: copy.deepcopy(models["original"]),
            "adapted": adapted,
            "source": source,
            "split": problem.split(scenario),
            "family": problem,
            "collect": scores,
            "collect_correct": lambda net, indices: scores(net, indices).correct,
            "features": None,
            "recipe": problem.recipe,
            "batch_size": 32,
            "seed": 0,
        }
        return AuditTask(**{**fields, **over})

    return SimpleNamespace(task=make, **models)
