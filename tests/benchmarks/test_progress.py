"""What a run says while it runs: stages, steps, losses, and a time left that does not jump."""

from __future__ import annotations

import io
import json
import random
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from stable_forgetting.benchmarks.cli import progress
from stable_forgetting.benchmarks.cli.progress import Display, Remaining, StepBar, words
from stable_forgetting.benchmarks.pipeline import position, schedule
from stable_forgetting.benchmarks.pipeline.executors import InlineExecutor
from stable_forgetting.benchmarks.pipeline.position import PositionFile, read_position
from stable_forgetting.benchmarks.pipeline.stage import ModelSpec, Plan, Result, Stage
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.common.protocol.benchmark import Runtime
from stable_forgetting.common.store.stages import StageStore

# Where a training stands --------------------------------------------------------------------------


def test_a_position_is_written_once_a_second(tmp_path, monkeypatch):
    clock = iter([10.0, 10.2, 10.9, 11.1])
    monkeypatch.setattr(position.time, "monotonic", lambda: next(clock))
    note = PositionFile(tmp_path)
    for step in (1, 2, 3):
        note(step, 40, 0.5)
        assert read_position(tmp_path, 0.0).step == 1
    note(4, 40, 0.25)
    at = read_position(tmp_path, 0.0)
    assert (at.step, at.total, at.loss, at.steps) == (4, 40, 0.25, 3)
    assert at.seconds == pytest.approx(1.1)
    assert at.left == pytest.approx(36 * 1.1 / 3)


def test_a_second_phase_has_a_rate_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(position, "EVERY", 0.0)
    clock = iter([0.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr(position.time, "monotonic", lambda: next(clock))
    note = PositionFile(tmp_path)
    for step in (1, 2, 1, 2):
        note(step, 10, 1.0)
    assert read_position(tmp_path, 0.0).left == pytest.approx(8.0)


def test_an_old_or_half_position_is_none_and_one_that_cannot_be_written_ends_nothing(tmp_path):
    PositionFile(tmp_path / "gone")(1, 2, 0.5)
    assert read_position(tmp_path, 0.0) is None
    PositionFile(tmp_path)(1, 2, 0.5)
    assert read_position(tmp_path, time.time() + 60) is None
    (tmp_path / position.FILE).write_text('{"step": 1')
    assert read_position(tmp_path, 0.0) is None


# The time left ------------------------------------------------------------------------------------


class Clockwork:
    """A plan whose stages take a given time, in the place of a store that knows it."""

    def __init__(self, seeds=4, rows=("gd", "gd_sine", "finetune"), noise=0.3):
        self.random, self.noise, self.took = random.Random(0), noise, {}
        self.lengths = {"original": 60.0, "retrain": 55.0, "unlearn": 18.0, "split": 0.1}
        self.lengths |= {"score": 2.0, "measure": 1.0}
        results = []
        for seed in range(seeds):
            split = self.stage("split", "", seed, {})
            original = self.stage("original", "original", seed, {"split": split})
            models = {"retrain": self.stage("retrain", "retrain", seed, {"split": split})}
            for row in rows:
                models[row] = self.stage("unlearn", row, seed, {"start": original})
            for label, model in models.items():
                scores = self.stage("score", label, seed, {"model": model})
                last = self.stage("measure", label, seed, {"scores": scores})
                results.append(Result(label, seed, 0, None, last))
        self.plan = Plan(load_suite("digits-class"), results)

    def stage(self, kind, method, seed, parents):
        recipe, params = {"train": {"epochs": 40}}, {"epochs": 8}
        spec = ModelSpec(
            benchmark="vision", protocol=recipe, seed=seed, method=method, params=params
        )
        return Stage(kind, spec, {"m": method, "s": seed}, parents, f"{kind}/{method}/{seed}")

    def done(self, kind, key):
        return {"stage_seconds": self.took[key]} if key in self.took else None

    def run(self, remaining):
        """(seconds gone, share of the whole that is done, what is said to be left), each second."""
        order = ["split", "original", "retrain", "unlearn", "score", "measure"]
        stages = sorted(self.plan.stages(), key=lambda s: order.index(s.kind))
        noise = [1 + self.noise * (2 * self.random.random() - 1) for _ in stages]
        seconds = [self.lengths[s.kind] * n for s, n in zip(stages, noise, strict=True)]
        remaining.planned(self.plan, {s.key for s in stages})
        now = 0.0
        for stage, length in zip(stages, seconds, strict=True):
            spent = 0.0
            while spent < length:
                left = length - spent if stage.kind in order[1:4] and spent > 0 else None
                yield now, sum(seconds) - now, remaining.seconds({stage.key: (spent, left)})
                step = min(1.0, length - spent)
                spent, now = spent + step, now + step
            self.took[stage.key] = length
            remaining.finished(stage)


def test_the_time_left_is_told_early_and_right_in_time():
    world = Clockwork()
    looks = list(world.run(Remaining(world, 1)))
    whole = looks[-1][0]
    assert next(now for now, _, left in looks if left is not None) < 0.02 * whole
    for now, truth, left in looks:
        if 0.25 * whole < now < 0.95 * whole:
            assert abs(left - truth) < 0.35 * truth


def test_recorded_stages_are_counted_and_workers_share_what_is_left():
    world = Clockwork(noise=0.0)
    list(world.run(Remaining(world, 1)))
    stages = list(world.plan.stages())
    measures = [stage.key for stage in stages if stage.kind == "measure"]
    training = next(stage.key for stage in stages if stage.kind == "unlearn")
    for workers, missing, seconds in (
        (1, measures[2:], len(measures[2:])),
        (2, measures[2:], len(measures[2:]) / 2),
        (1, [*measures[2:], training], len(measures[2:]) + 18),
    ):
        remaining = Remaining(world, workers)
        remaining.planned(world.plan, missing)
        assert remaining.seconds({}) == pytest.approx(seconds)


def test_a_pretraining_tells_nothing_of_the_trainings_after_it():
    """Half an hour on other data is not what every training is going to take."""
    world = Clockwork()
    first = world.stage("pretrain", "pretrain", 0, {})
    remaining = Remaining(world, 1)
    remaining.planned(world.plan, {stage.key for stage in world.plan.stages()})
    remaining._missing[first.key] = first
    assert remaining.seconds({first.key: (600.0, 1200.0)}) is None
    world.took[first.key] = 1800.0
    remaining.finished(first)
    assert remaining.seconds({}) is None


def test_words_do_not_flicker():
    assert words(None) == ""
    assert [words(s) for s in (2, 41, 44, 99, 130, 3000)] == [
        "~5 s left",
        "~40 s left",
        "~45 s left",
        "~100 s left",
        "~2 min left",
        "~50 min left",
    ]


# What is printed ----------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch):
    """Everything is looked at and written at once."""
    monkeypatch.setattr(progress, "LOOK", 0.005)
    monkeypatch.setattr(position, "EVERY", 0.0)


def run(suite, store, console):
    with (
        InlineExecutor() as executor,
        Display(console, "tiny", StageStore(store), every=0.0) as display,
    ):
        schedule.run_suite(suite, Runtime(store), executor, watcher=display)
    return console.file.getvalue()


def test_a_pipe_gets_lines_with_step_time_and_the_loss_that_is_logged(tiny_suite, tmp_path, hasty):
    console = Console(file=io.StringIO(), width=160)
    text = run(load_suite(str(tiny_suite())), tmp_path, console)
    assert "\x1b" not in text
    steps = re.findall(r"(\d+)/(\d+) stages, .*seed-1 step (\d+)/(\d+) loss (\d\.\d+)", text)
    assert steps
    assert all(int(done) < int(total) and int(a) <= int(b) for done, total, a, b, _ in steps)
    logs = [json.loads(line) for p in tmp_path.rglob("scalars.jsonl") for line in p.open()]
    logged = {f"{v:.3g}" for log in logs for key, v in log.items() if key.startswith("loss/")}
    assert {loss for *_, loss in steps} <= logged
    assert re.search(r"stages, ~\d+ s left", text)
    assert not list(tmp_path.glob(f"stages/*/{position.FILE}"))


def test_a_terminal_gets_a_bar_for_every_training(tiny_suite, tmp_path, hasty):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False)
    text = re.sub(r"\x1b\[[0-9;?]*\w", "", run(load_suite(str(tiny_suite())), tmp_path, console))
    assert re.search(r"original/seed-1 .*\d+/\d+ .*loss \d", text)
    assert re.search(r"tiny .*\d+/\d+ ", text)


def test_one_training_tells_step_loss_and_time_in_a_pipe():
    console = Console(file=io.StringIO(), width=80)
    with StepBar(console, "gd_sine", every=-1.0) as note:
        note(1, 4, float("nan"))
        note(2, 4, 0.125)
    lines = console.file.getvalue().splitlines()
    assert lines == ["gd_sine: step 1/4 loss –", "gd_sine: step 2/4 loss 0.125 ~5 s left"]


def test_lines_come_ever_less_often():
    console = Console(file=io.StringIO(), width=80)
    display = Display(console, "slow", StageStore(Path("/nowhere")))
    display.total, display.done = 10, 1
    display._started = display._spoke = time.monotonic() - 30
    display._look()
    assert len(console.file.getvalue().splitlines()) == 1
    display._started, display._spoke = time.monotonic() - 3600, time.monotonic() - 30
    display._look()
    assert len(console.file.getvalue().splitlines()) == 1
