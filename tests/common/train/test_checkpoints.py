"""Checkpoints: a killed run resumes bit for bit, a damaged file starts again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from stable_forgetting.common.base import stopping
from stable_forgetting.common.base.errors import CheckpointError
from stable_forgetting.common.bounded.attach import attach
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.objectives.objectives import CrossEntropy, gradient_difference
from stable_forgetting.common.store import hashed
from stable_forgetting.common.store.weights import save_weights
from stable_forgetting.common.train import loop
from stable_forgetting.common.train.checkpoint import of_training
from stable_forgetting.common.train.tracking import Tracker, copy_scalars, read_scalars
from tests.common.train.trained import (
    MLP,
    Killed,
    Sink,
    chained_loaders,
    interrupted,
    kill_at,
    mixed_loaders,
    pair_loaders,
    small,
)


@pytest.mark.parametrize("killed_after", [4, 7, 9])
@pytest.mark.parametrize("loaders", [mixed_loaders, chained_loaders, pair_loaders])
@pytest.mark.parametrize("kind", ["adamw", "momentum", "sgd", "adapter"])
def test_a_killed_run_resumes_bit_for_bit(tiny, source, run, tmp_path, kind, loaders, killed_after):
    config = small(
        steps=10,
        checkpoint_every=2,
        weight_decay=0.01,
        optimizer="adamw" if kind in ("adamw", "adapter") else "sgd",
        momentum=0.9 if kind == "momentum" else 0.0,
    )
    objective = CrossEntropy() if loaders is not pair_loaders else gradient_difference()

    def go(path, **options):
        model, sink = tiny.net(dropout=0.3, batch_norm=True), Sink()
        if kind == "adapter":
            attach(
                model,
                MLP,
                AdapterConfig(rank=2, phi="tanh", omega=9.0),
                torch.Generator().manual_seed(1),
            )
        options |= {"loaders": loaders(tiny, source), "objective": objective, "tracker": sink}
        try:
            result = run(model, config, checkpoint=path, **options)
        except Killed:
            return model, sink, None
        return model, sink, result

    whole, sink, result = go(None)
    path = tmp_path / "deep" / "checkpoint.safetensors"
    go(path, progress=kill_at(killed_after))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    resumed, rest, again = go(path)
    assert tiny.same(whole, resumed)
    start = killed_after // 2 * 2
    assert rest.rows == {step: row for step, row in sink.rows.items() if step > start}
    assert rest.rewound == start
    assert again.last == result.last and again.peak == result.peak and again.steps == 10
    finished, rest, again = go(path, progress=kill_at(1))
    assert tiny.same(whole, finished) and not rest.rows, "a finished run is not trained again"
    assert again.last == result.last and again.peak == result.peak and again.steps == 10


def test_a_resumed_run_rounds_alike_in_any_layout_of_weights(tiny, run, tmp_path):
    config, path = small(steps=12, checkpoint_every=2), tmp_path / "c.safetensors"

    def net():
        model = tiny.net()
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data = layer.weight.data.t().contiguous().t()  # as channels_last
        return model

    whole, killed, resumed = net(), net(), net()
    run(whole, config)
    with pytest.raises(Killed):
        run(killed, config, checkpoint=path, progress=kill_at(5))
    run(resumed, config, checkpoint=path)
    assert tiny.same(whole, resumed)


def test_stateful_hooks_travel_with_the_checkpoint(tiny, run, tmp_path):
    class Counter:
        value = 0

        def __call__(self, model):
            self.value += 1

        def state(self):
            return {"value": torch.tensor(self.value), "head.weight": torch.tensor(-self.value)}

        def load_state(self, state):
            self.value = int(state["value"])
            assert state.keys() == self.state().keys() and state["head.weight"] == -self.value

    class Empty:
        def state(self):
            return {}

        def load_state(self, state):
            assert not state

    path, counter = tmp_path / "c.safetensors", Counter()
    config = small(checkpoint_every=2)
    options = {"checkpoint": path, "stateful": {"counter": counter, "empty": Empty()}}
    with pytest.raises(Killed):
        run(tiny.net(), config, after_step=[counter], progress=kill_at(5), **options)
    counter = Counter()
    options["stateful"] = {"counter": counter, "empty": Empty()}
    run(tiny.net(), config, after_step=[counter], **options)
    assert counter.value == 6
    with pytest.raises(AssertionError, match="a loader's name"):  # one would not be kept
        run(tiny.net(), config, stateful={"retain": counter})


def test_seconds_count_every_sitting(tiny, run, tmp_path):
    path = tmp_path / "c.safetensors"

    def slow(step, total, loss):
        time.sleep(0.05)
        if step == 4:
            raise Killed

    config = small(checkpoint_every=2)
    with pytest.raises(Killed):
        run(tiny.net(), config, checkpoint=path, progress=slow)
    done = run(tiny.net(), config, checkpoint=path)
    assert done.seconds > done.earlier > 0.1


def test_a_stopped_run_stays_stopped(tiny, run, tmp_path):
    path = tmp_path / "c.safetensors"
    config = small(evaluate_every=2, stop_below={"loss": 1})
    options = {"checkpoint": path, "evaluate_during": lambda model, step: {"loss": 9 - 3 * step}}
    first, again = (run(tiny.net(), config, **options) for _ in range(2))
    assert first.stopped == again.stopped == "loss < 1" and first.steps == again.steps == 4


def test_checkpoint_every_may_change(tiny, run, tmp_path, caplog):
    path = tmp_path / "c.safetensors"
    interrupted(tiny, run, path)
    with caplog.at_level("INFO"):
        run(tiny.net(), small(checkpoint_every=3), checkpoint=path)
    assert "resumed at step 2" in caplog.text


def test_damaged_and_foreign_checkpoints_start_again_with_one_line(tiny, run, tmp_path, caplog):
    path = tmp_path / "c.safetensors"
    config = unchanged = small(checkpoint_every=2)
    whole = tiny.net()
    run(whole, config)

    def refused(model=None, config=config, **options):
        content = path.read_bytes()
        caplog.clear()
        sink = Sink()
        trained = model or tiny.net()
        run(trained, config, checkpoint=path, tracker=sink, **options)
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        line = record.getMessage()
        assert "\n" not in line and str(path) in line and line.endswith("starts again")
        assert min(sink.rows) == 1 and sink.rewound == 0
        if model is None and config is unchanged and not options:
            assert tiny.same(trained, whole)
        path.write_bytes(content)
        return line

    interrupted(tiny, run, path)
    content = path.read_bytes()
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
    for damaged in (b"", b"not a checkpoint", content[: len(content) // 2]):
        path.write_bytes(damaged)
        assert "damaged" in refused()
    for gone in ("model.head.weight", "rng", "optimizer.0.exp_avg", "state.retain.cursor"):
        save_file({k: v for k, v in tensors.items() if k != gone}, path, metadata=meta)
        assert "damaged" in refused(), gone
    save_file(tensors | {"model.head.bias": torch.zeros(9)}, path, metadata=meta)
    assert "damaged" in refused()
    for position in range(len(content) - 40, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 16
        path.write_bytes(flipped)
        assert "damaged" in refused()
    path.write_bytes(content)
    frozen = tiny.net()
    frozen.stem.requires_grad_(False)
    wider = tiny.net()
    wider.head = nn.Linear(8, 5)
    assert "another run" in refused(frozen)
    assert "another run" in refused(wider)
    assert "another run" in refused(config=small(checkpoint_every=2, lr=0.5))
    assert "another run" in refused(seed=4)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_a_training_after_a_checkpoint(tiny, run, request, tmp_path, name):
    """At the next step, wherever checkpoint_every is; and the resumed run has the same weights."""
    path, number = tmp_path / "checkpoint.safetensors", getattr(signal, name)
    config, steps = small(steps=8, checkpoint_every=500), []

    def progress(step, total, loss):
        steps.append(step)
        if steps == [1, 2, 3]:
            os.kill(os.getpid(), number)

    usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    before = signal.signal(number, usual)  # a runner of tests may have its own
    request.addfinalizer(lambda: signal.signal(number, before))
    with stopping.listening(), pytest.raises(KeyboardInterrupt):
        run(tiny.net(), config, checkpoint=path, progress=progress)
    assert stopping.exit_code() == 128 + number and signal.getsignal(number) == usual
    assert steps == [1, 2, 3, 4] and path.is_file()
    model, whole = tiny.net(), tiny.net()
    steps.clear()
    run(model, config, checkpoint=path, progress=lambda step, total, loss: steps.append(step))
    assert steps == [5, 6, 7, 8]
    run(whole, config)
    for key, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor)


def test_a_kill_between_a_checkpoint_and_its_evaluation_loses_neither(tiny, run, tmp_path):
    """A step is evaluated before it is kept: what stopped a run stops the resumed one, too."""
    path, seen = tmp_path / "checkpoint.safetensors", []

    def evaluate(model, step):
        seen.append(step)
        if seen == [2, 4]:
            raise Killed
        return {"loss": 1.0}

    config = small(steps=8, checkpoint_every=2, evaluate_every=2)
    with pytest.raises(Killed):
        run(tiny.net(), config, checkpoint=path, evaluate_during=evaluate)
    run(tiny.net(), config, checkpoint=path, evaluate_during=evaluate)
    assert seen == [2, 4, 4, 6, 8]


def test_a_training_that_starts_again_takes_the_later_ones_along(tiny, run, tmp_path):
    """Their rows leave the log with its own, so they may not go on from where they were."""
    paths = [of_training(tmp_path / "checkpoint.safetensors", number) for number in range(3)]
    for path in paths:
        run(tiny.net(), small(checkpoint_every=2), checkpoint=path)
    paths[1].write_bytes(b"damaged")
    run(tiny.net(), small(checkpoint_every=2), checkpoint=paths[1])
    assert [path.is_file() for path in paths] == [True, True, False]


@pytest.mark.parametrize("name", ["run", "run-1"])
def test_what_others_keep_beside_a_checkpoint_stays(tiny, run, tmp_path, name):
    """A run with a number in its name is no later training of another one."""
    others = [tmp_path / f"run-{number}.safetensors" for number in (2, 3)]
    folders = [tmp_path / f"{name}.notes", tmp_path / f"{name}.2"]
    for folder in folders:
        folder.mkdir()
    for path in (*others, tmp_path / f"{name}.safetensors"):
        run(tiny.net(), small(checkpoint_every=2), checkpoint=path)
    assert all(path.is_file() for path in others) and all(path.is_dir() for path in folders)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_log_is_on_the_disk_before_its_checkpoint(tiny, run, tmp_path, monkeypatch):
    """Else a power cut leaves a checkpoint whose log lacks rows that nobody writes again."""
    synced, sync = [], os.fsync

    def fsync(handle):
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name.split(".")[:2])
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    tracker = Tracker(tmp_path / "scalars.jsonl")
    config = small(steps=6, checkpoint_every=2)
    run(tiny.net(), config, checkpoint=tmp_path / "checkpoint.safetensors", tracker=tracker)
    one = [["scalars", "jsonl"], [tmp_path.name], ["", "checkpoint"], [tmp_path.name]]
    assert synced[2:] == 3 * one, "after the rewinding at the start"


@pytest.mark.parametrize("damage", ["swapped", "removed", "trajectory"])
def test_what_lies_next_to_a_checkpoint_is_checked_with_it(tiny, run, tmp_path, caplog, damage):
    """Rows that are gone would stay away for ever, and other rows would stay for ever."""
    log, scores = tmp_path / "scalars.jsonl", tmp_path / "trajectory" / "2.safetensors"
    config, path = small(steps=8, checkpoint_every=2), tmp_path / "checkpoint.safetensors"
    scores.parent.mkdir()
    scores.write_bytes(b"scores")

    def train(stop=None):
        def progress(step, total, loss):
            if step == stop:
                raise Killed

        with closing(Tracker(log)) as tracker:
            run(tiny.net(), config, checkpoint=path, tracker=tracker, progress=progress)

    with pytest.raises(Killed):
        train(5)
    whole = read_scalars(log)
    if damage == "swapped":
        log.write_text(log.read_text().replace('"step": 1,', '"step": 1, "other": 1,'))
    elif damage == "removed":
        log.unlink()
    else:
        scores.write_bytes(b"others")
    train()
    assert "not what was written; this training starts again" in caplog.text
    assert read_scalars(log)[: len(whole)] == whole and len(read_scalars(log)) == 8
    caplog.clear()
    train()
    assert "starts again" not in caplog.text


def test_a_stages_log_holds_its_rows_and_nothing_else(tmp_path):
    log, target = tmp_path / "scratch.jsonl", tmp_path / "scalars.jsonl"
    rows = [b'{"step": 1, "loss": 2.0}', b'{"step": 2, "loss": 1.5}', b'{"step": 2, "fa": 9.0}']
    log.write_bytes(b"\n".join(rows) + b"\n\x8f\x01 appended")
    copy_scalars(log, target)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "fa": 9.0}]


def test_a_checkpoint_is_due_after_minutes(tiny, run, tmp_path, monkeypatch):
    """The clock goes on by a minute at every look."""
    clock, saved = iter(range(0, 10**6, 60)), []
    write = loop.save
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))

    def save(run, path, step, *stopped):
        saved.append(step)
        write(run, path, step, *stopped)

    monkeypatch.setattr(loop, "save", save)
    config = small(steps=8, checkpoint_every="1.5min")
    run(tiny.net(), config, checkpoint=tmp_path / "c.safetensors")
    assert saved[-1] == 8 and 1 < len(saved) < 8
    with pytest.raises(ValueError):
        small(checkpoint_every="soon")


def test_an_end_whose_weights_are_stored_next_is_no_checkpoint(tiny, run, tmp_path):
    path = tmp_path / "c.safetensors"
    run(tiny.net(), small(steps=6, checkpoint_every=4), checkpoint=path, keeps_last=False)
    assert json.loads(hashed.read_metadata(path)["notes"])["step"] == 4
    path.unlink()
    run(tiny.net(), small(steps=4, checkpoint_every=4), checkpoint=path, keeps_last=False)
    assert not path.exists()


def test_a_file_is_hashed_while_it_is_written(tmp_path):
    """One tensor at a time in main memory, of any type and shape; safetensors reads it."""
    tensors = {
        "bool": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "half": torch.randn(3, 5).bfloat16().T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "whole": torch.randn(7, 2),
    }
    path = tmp_path / "x.safetensors"
    hashed.write_hashed(path, tensors, {"notes": '"sha256": "' + "0" * 64})
    hashed.check_hashed(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    content = path.read_bytes()
    for position in range(8, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            hashed.check_hashed(path)


def test_a_complex_buffer_travels_with_the_checkpoint(tiny, run, tmp_path):
    config, path = small(checkpoint_every=2), tmp_path / "c.safetensors"

    def net(value, dtype=torch.complex64):
        model = tiny.net()
        model.register_buffer("turns", torch.full((3,), value, dtype=dtype))
        return model

    with pytest.raises(Killed):
        run(net(1j), config, checkpoint=path, progress=kill_at(3))
    resumed = net(2j)
    run(resumed, config, checkpoint=path)
    assert torch.equal(resumed.turns, net(1j).turns)
    double = net(1j, torch.complex128)
    with pytest.raises(CheckpointError, match=r"'buffer\.turns' is complex128, which a checkpoint"):
        run(double, config, checkpoint=tmp_path / "d.safetensors")
    with pytest.raises(CheckpointError, match=r"'turns' is torch\.complex128, .* it complex64"):
        save_weights(double, tmp_path)
