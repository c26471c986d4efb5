"""What a worker process is before its first stage, and which card it sees."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from stable_forgetting.benchmarks.cli import session
from stable_forgetting.benchmarks.costs.estimate import estimates
from stable_forgetting.benchmarks.leaderboard import run
from stable_forgetting.benchmarks.pipeline import executors
from stable_forgetting.benchmarks.suite.resolve import load_suite

FAULTS = """
import resource
import torch
from stable_forgetting.benchmarks.pipeline.executors import prepare_worker

prepare_worker(1, ())

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        torch.ones(1 << 20) + 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_a_worker_keeps_the_memory_that_it_frees():
    """Fifty times two blocks of 4 MiB, 1,024 pages each: else 100,000 faults."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 5_000


def _visible(folder, workers):
    """The card that this process sees, once all are here."""
    (folder / f"{os.getpid()}").touch()
    limit = time.monotonic() + 120
    while len(list(folder.iterdir())) < workers and time.monotonic() < limit:
        time.sleep(0.05)
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(("cards", "turns"), [(["3", "MIG-5"], 2), (["1"], 1)])
def test_each_worker_sees_a_card_of_its_own(tmp_path, cards, turns):
    """More workers than cards share them, which somebody has asked for."""
    pool = executors.WorkerPool(2, (1, ()), cards)
    try:
        for turn in range(turns):
            if turn:
                pool.renew()
            folder = tmp_path / str(turn)
            folder.mkdir()
            seen = [task.result() for task in [pool.submit(_visible, folder, 2) for _ in "ab"]]
            assert sorted(seen) == sorted((cards * 2)[:2])
    finally:
        pool.shutdown()


def test_cards_are_counted_without_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(executors, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia5", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert executors.cards_of("auto") == ["0"]  # as CUDA numbers it in a container
    (tmp_path / "nvidia7").touch()
    assert executors.cards_of("auto") == ["0", "1"] and session.default_workers("cuda") == 2
    assert executors.cards_of("cuda:1") == [] and session.default_workers("cuda:1") == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a,4")
    assert executors.cards_of("cuda") == ["2", "GPU-a", "4"]
    assert executors.cards_of("cpu") == [] and session.default_workers("auto") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert executors.cards_of("auto") == [] and session.default_workers("cuda") == 1


def test_a_card_that_is_full_is_told_with_its_mends():
    """In the numbers of ``unlearn plan``."""
    full = load_suite("tofu-llama2-7b-forget10")
    text = "gd/seed-1: OutOfMemoryError: CUDA out of memory."
    planned = next(line for line in estimates(full) if line.row == "gd").memory / 1e9
    told = run.with_mends(full, text)
    assert told.startswith(text) and f"it holds {planned:.0f} GB by unlearn plan" in told
    less = {way: size for size, way in re.findall(r"(\d+) GB with ([\w. :]+)", told)}
    assert {"accumulation: 32", "LoRA of rank 8", "FSDP on 8 cards"} <= less.keys()
    assert all(int(size) < planned for size in less.values())
    assert int(less["LoRA of rank 8"]) < 20, "the weights in bfloat16, and little more"
    small = run.with_mends(load_suite("digits-class"), text)
    assert "accumulation" in small and "FSDP" in small and "workers" not in small
    shared = f"{text} Process 7 has 9 GiB memory in use. Process 8 has 20 GiB memory in use."
    assert "run again with fewer --workers" in run.with_mends(load_suite("digits-class"), shared)
    assert run.with_mends(full, "gd/seed-1: ValueError: no") == "gd/seed-1: ValueError: no"


def test_a_second_signal_does_not_wait_for_a_workers_step():
    class Worker:
        alive = True

        def terminate(self):
            """It goes on to the end of its step."""

        def join(self, timeout):
            raise KeyboardInterrupt

        def is_alive(self):
            return self.alive

        def kill(self):
            self.alive = False

    pool, workers = executors.WorkerPool(2, (1, ())), [Worker(), Worker()]
    started = dict(enumerate(workers))
    pool._pool = SimpleNamespace(_processes=started, shutdown=lambda **_: None)
    with pytest.raises(KeyboardInterrupt):
        pool.abandon()
    assert not any(worker.alive for worker in workers)
