"""What a sweep says of each rate: distance, share at the bound, what is kept, what diverged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stable_forgetting.benchmarks.pipeline.block import Shares, _AtBall
from stable_forgetting.benchmarks.pipeline.cells import Cell
from stable_forgetting.benchmarks.suite.grid import acceptance
from stable_forgetting.benchmarks.sweeps.report import regime_sections
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.statistics import adapter_statistics, shares_beyond
from stable_forgetting.vision.metrics import SWEEP_AXES

RULE = acceptance(SWEEP_AXES, {}, "test")
TARGETS = {1: {"fa": 0.0, "ra": 100.0, "ta": 98.0}}


def cell(lr, step=100, fa=0.0, ra=100.0, seed=1, **over):
    metrics = {"fa": fa, "ra": ra, "ta": 98.0}
    return Cell("m", seed, False, lr, 1.0, step, metrics, **over)


def dead(lr, step):
    lost = dict.fromkeys(("fa", "ra", "ta"))
    return Cell("m", 1, False, lr, 1.0, step, lost, nonfinite=True)


def tables(cells):
    """Title -> the row of the only method, without its name."""
    board = SimpleNamespace(
        cells=cells,
        lines=[SimpleNamespace(label="m")],
        targets=TARGETS,
        titles=SimpleNamespace(retained="RA"),
        rule=RULE,
    )
    return {each.title: list(each.content.rows[0][1:]) for each in regime_sections(board)}


def test_each_rate_has_its_own_column():
    cells = [
        cell(0.1, ra=99.0, delta_ratio=0.5, bound_share=0.1, turned_share=0.02),
        cell(0.1, 300, ra=97.0, delta_ratio=1.5, bound_share=0.3, turned_share=0.04),
        cell(1.0, fa=40.0, ra=20.0, delta_ratio=1234.0),
        cell(1.0, 300, ra=60.0, delta_ratio=4321.0),
        dead(10.0, 300),
        dead(10.0, 1000),
    ]
    assert tables(cells) == {
        "Distance from Original": ["1", "2778", "–"],
        "Where the bound acts": ["20 (3)", "–", "–"],
        "RA where forgotten": ["98.0 (2 of 2)", "60.0 (1 of 2)", "–"],
        "Diverged": ["–", "–", "2 of 2, by step 300"],
    }


def test_what_would_be_empty_is_left_out():
    found = tables([cell(0.1, delta_ratio=0.5), cell(1.0, delta_ratio=0.5, bound_share=0.25)])
    assert "Diverged" not in found
    assert found["Where the bound acts"] == ["–", "25"], "an older block has no second share"
    assert set(tables([cell(0.1)])) == {"RA where forgotten"}


def test_cells_of_a_seed_whose_retrain_is_not_there_yet_are_not_judged():
    found = tables([cell(0.1, ra=98.0), cell(0.1, seed=2, ra=10.0, delta_ratio=0.5)])
    assert found["RA where forgotten"] == ["98.0 (1 of 1)"]
    assert found["Distance from Original"] == ["0.5"]


def test_an_entrywise_bound_is_read_off_the_adapters(tiny):
    import torch

    model = tiny.net(1)
    assert _AtBall().share(model) == Shares()
    attach(
        model,
        tiny.targets["mlp"],
        AdapterConfig(phi="sine", omega=100),
        torch.Generator().manual_seed(0),
    )
    assert _AtBall().share(model) == Shares(0.0, 0.0)
    for name, parameter in model.named_parameters():
        if name.endswith((".A", ".Bt")):
            parameter.data.fill_(0.05)
    share = _AtBall().share(model)
    assert share.bound_share == shares_beyond(model, (0.5,))[0] == 1.0
    assert 0 <= share.turned_share <= share.bound_share


@pytest.mark.parametrize(("clip", "acting"), [(0.1, 1.0), (1.5, 0.0)])
def test_a_clip_acts_from_its_threshold_on(tiny, clip, acting):
    import torch

    model, draw = tiny.net(1), torch.Generator().manual_seed(0)
    attach(model, tiny.targets["mlp"], AdapterConfig(phi="clip", clip=clip), draw)
    for name, parameter in model.named_parameters():
        if name.endswith((".A", ".Bt")):
            parameter.data.fill_(0.2)  # every argument is 8 * 0.2^2 = 0.32, below 0.5
    assert _AtBall().share(model) == Shares(acting, 0.0)
    assert adapter_statistics(model)["bound_active"] == acting


def test_the_share_at_a_threshold_counts_entries(tiny):
    import torch

    model = tiny.net(1)
    attach(model, tiny.targets["mlp"], AdapterConfig(omega=1), torch.Generator().manual_seed(0))
    factors = [p for n, p in model.named_parameters() if n.endswith((".A", ".Bt"))]
    assert factors
    shares = shares_beyond(model, (-1.0, 0.0, 10.0))
    assert shares == [1.0, pytest.approx(0.0), 0.0], "the product is zero before the first step"
