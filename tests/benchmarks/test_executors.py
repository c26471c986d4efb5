"""What a worker process is before its first stage."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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
