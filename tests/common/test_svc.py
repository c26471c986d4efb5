"""The fast support vector machine against scikit-learn's, converged."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.svm import SVC

from stable_forgetting.common.membership import svc
from stable_forgetting.common.membership.quadratic import Programme, minimise

KINDS = ("confidence", "entropy", "wide", "simplex", "repeated")


def sides(kind: str, seed: int, shift: float = 1.0, count: int = 600):
    """(positive, negative, points), each (N, d): what attacks look at, in shape and range."""
    rng = np.random.default_rng(seed)

    def draw(mean: float) -> np.ndarray:
        margins = rng.normal(mean, 3.0, count)
        if kind == "confidence":
            return (1 / (1 + np.exp(-margins)))[:, None]
        if kind == "entropy":
            return np.log1p(np.exp(-margins / 3))[:, None]
        if kind == "wide":
            return (np.exp(-margins / 3) * 4)[:, None]
        if kind == "repeated":
            return np.round(np.maximum(margins, 0.0) / 12, 3)[:, None]
        logits = rng.normal(0, 1.5, (count, 8))
        logits[np.arange(count), np.arange(count) % 8] += margins
        shares = np.exp(logits - logits.max(1, keepdims=True))
        return shares / shares.sum(1, keepdims=True)

    return draw(2 + shift), draw(2 - shift), draw(2.0)


def reference(positive, negative, tol=1e-6) -> SVC:
    values = np.concatenate([positive, negative])
    labels = np.repeat([1, 0], [len(positive), len(negative)])
    return SVC(C=3, gamma="auto", tol=tol).fit(values, labels)


@pytest.mark.parametrize("shift", [0.5, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_decides_as_the_converged_fit(kind, shift):
    positive, negative, points = sides(kind, 0, shift)
    problem = svc.merged(positive, negative)
    if len(problem.signs) < svc.MIN_SAMPLES:
        assert kind == "repeated"
        decide = svc.fit_svc(positive, negative)
    else:
        decide = svc.fit_low_rank(problem)
        assert decide is not None, "these problems need no libsvm"
    exact = reference(positive, negative)
    points = np.concatenate([points, positive, negative])
    doubtful = np.abs(exact.decision_function(points)) < 1e-3
    same = decide(points) == (exact.predict(points) == 1)
    assert (same | doubtful).all()
    assert abs(decide(points).mean() - exact.predict(points).mean()) <= 1e-3


@pytest.mark.parametrize("kind", ["entropy", "simplex"])
def test_the_certificate_is_libsvms_rule_on_the_exact_kernel(kind):
    positive, negative, _ = sides(kind, 3)
    problem = svc.merged(positive, negative)
    kernel = svc.low_rank_kernel(problem, svc.ERRORS[0])
    weights, _ = svc.certified_optimum(problem, kernel)
    whole = Programme(kernel.features, problem.signs, problem.limits)
    values = problem.values(weights, problem.samples)
    violation, _ = whole.optimality(np.abs(weights), values)
    assert violation <= svc.TOLERANCE


def test_the_error_of_the_low_rank_stays_below_its_bound():
    positive, negative, _ = sides("simplex", 1)
    problem = svc.merged(positive, negative)
    rng = np.random.default_rng(0)
    for error in svc.ERRORS[:2]:
        kernel = svc.low_rank_kernel(problem, error)
        assert kernel.error <= error
        for weights in (problem.limits, problem.limits * rng.uniform(-1, 1, len(problem.limits))):
            low = kernel.features @ (weights @ kernel.features)
            apart = np.abs(low - problem.values(weights, problem.samples)).max()
            assert apart <= kernel.error


def test_points_far_from_all_samples_get_exact_values():
    """Where the pivots do not reach, the low rank alone would say the intercept's sign."""
    rng = np.random.default_rng(0)
    positive, negative = rng.uniform(0, 1, (400, 1)), rng.uniform(0.5, 1.5, (400, 1))
    points = np.linspace(-12, 14, 500)[:, None]
    decide = svc.fit_low_rank(svc.merged(positive, negative))
    exact = reference(positive, negative)
    doubtful = np.abs(exact.decision_function(points)) < 1e-3
    assert ((decide(points) == (exact.predict(points) == 1)) | doubtful).all()


def test_equal_samples_become_one_with_a_higher_limit():
    problem = svc.merged(np.array([[1.0], [0.0], [1.0]]), np.array([[1.0]]))
    assert problem.samples[:, 0].tolist() == [0.0, 1.0, 1.0]
    assert problem.signs.tolist() == [1.0, 1.0, -1.0]
    assert problem.limits.tolist() == [3.0, 6.0, 3.0] and problem.gamma == 1.0


def test_small_problems_are_libsvms():
    positive, negative, points = sides("confidence", 0, count=200)
    assert svc.fit_low_rank(svc.merged(positive, negative)) is None
    plain = reference(positive, negative, tol=1e-3).predict(points) == 1
    assert (svc.fit_svc(positive, negative)(points) == plain).all()


@pytest.mark.parametrize(
    ("name", "value"), [("MAX_RANK", 2), ("SOLVER_TOLERANCE", -10.0), ("ERRORS", ())]
)
def test_without_a_certificate_libsvm_is_asked(monkeypatch, name, value):
    monkeypatch.setattr(svc, name, value)
    positive, negative, points = sides("entropy", 0)
    assert svc.fit_low_rank(svc.merged(positive, negative)) is None
    plain = reference(positive, negative, tol=1e-3).predict(points) == 1
    assert (svc.fit_svc(positive, negative)(points) == plain).mean() > 0.995


def test_a_wrong_kernel_is_not_certified(monkeypatch):
    """The certificate looks at the exact kernel, not at what was solved."""
    positive, negative, _ = sides("simplex", 0)
    problem = svc.merged(positive, negative)
    monkeypatch.setattr(svc, "FREE_RANK", 0)
    kernel = svc.low_rank_kernel(problem, 50.0)
    assert kernel.error > 1 and svc.certified_optimum(problem, kernel) is None


def test_an_undetermined_intercept_is_left_to_libsvm():
    """Both sides alike: every variable ends at its limit, any intercept in [-1, 1] is optimal."""
    rng = np.random.default_rng(0)
    same = 1e-4 * rng.uniform(0, 1, (700, 1))
    other = 1e-4 * rng.uniform(0, 1, (700, 1))
    problem = svc.merged(same, other)
    whole = svc.low_rank_kernel(problem, svc.ERRORS[-1])
    programme = Programme(whole.features, problem.signs, problem.limits)
    alpha = minimise(programme, svc.SOLVER_TOLERANCE)
    assert (alpha == problem.limits).all()
    assert svc.fit_low_rank(problem) is None


def test_the_same_bits_again():
    positive, negative, points = sides("simplex", 2)
    problem = svc.merged(positive, negative)
    kernel = svc.low_rank_kernel(problem, svc.ERRORS[0])
    first, second = (svc.certified_optimum(problem, kernel) for _ in range(2))
    assert (first[0] == second[0]).all() and first[1] == second[1]
    assert (
        svc.fit_svc(positive, negative)(points) == svc.fit_svc(positive, negative)(points)
    ).all()


def test_a_hand_made_programme():
    """Two samples at distance: alpha = 1 / (1 - k) on both, or the limit."""
    features = np.array([[1.0, 0.0], [0.6, 0.8]])
    for limit, expected in ((10.0, 1 / (1 - 0.6)), (2.0, 2.0)):
        programme = Programme(features, np.array([1.0, -1.0]), np.full(2, limit))
        alpha = minimise(programme, 1e-9)
        assert alpha == pytest.approx([expected] * 2, rel=1e-6)
    violation, intercept = programme.optimality(alpha, programme.values(alpha))
    assert violation <= 1e-9 and intercept == pytest.approx(0.0, abs=1e-6)
