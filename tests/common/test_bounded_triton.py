"""The Triton kernels against float64, in Triton's interpreter and in a process of their own.

No GPU is needed: the interpreter runs the kernels' arithmetic on NumPy (but not the precision of
tensor cores), and the compiler makes machine code for GPUs that are not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here")
ROOT = Path(__file__).resolve().parents[2]
PHI = ("sine", "tanh", "sigmoid", "relu", "clip")
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-8}  # the interpreter truncates to bfloat16


def run_alone(name: str, **variables: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **variables},
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not take this NumPy")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found() -> dict:
    return run_alone("triton_cases.py")


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("phi", PHI)
def test_every_phi_agrees_with_float64(phi, dtype, found):
    errors = found["errors"][f"{phi} {dtype}"]
    assert errors["W"] <= ROUNDING[dtype] and errors["W from a start"] <= ROUNDING[dtype]
    assert max(errors[n] for n in ("dW", "dA of a rounded G", "dBt of a rounded G")) <= 1e-6
    assert max(errors["dA"], errors["dBt"]) <= ROUNDING[dtype]  # G is rounded to it


@pytest.mark.parametrize("rank", [1, 4, 8, 32])
def test_every_rank_agrees_with_float64(rank, found):
    assert max(found["errors"][f"rank {rank}"].values()) <= 1e-6


def test_one_token(found):
    assert max(found["errors"]["one token"].values()) <= 1e-6


@pytest.mark.parametrize("phi", PHI)
def test_ranks_beyond_the_kernels_agree_with_float64(phi, found):
    assert max(found["errors"][f"compiled {phi}"].values()) <= 1e-6


def test_tanh_and_sigmoid_do_not_cancel_near_zero(found):
    assert found["near zero"] <= 4e-7


def test_the_layer_finds_the_kernels(found):
    assert max(found["layer"].values()) <= 1e-6, found["layer"]


def test_same_bits_strides_and_options(found):
    assert all(found["equalities"].values()), found["equalities"]
    assert len(found["equalities"]) == 7


# Without an interpreter ---------------------------------------------------------------------------


def test_a_processor_that_is_not_there_is_not_available():
    from stable_forgetting.common.bounded import triton as bounded_triton

    assert bounded_triton.available(torch.ones(2)) is bounded_triton.INTERPRETED
    assert not bounded_triton.available(torch.ones(2, dtype=torch.float64))


def test_compiled_bodies_are_phi_and_its_slope():
    from stable_forgetting.common.bounded.phi import Bound
    from stable_forgetting.common.bounded.triton import _gradient_body, _phi_body

    z = torch.linspace(-3, 3, 41, dtype=torch.float64).requires_grad_()
    for phi in PHI:
        arguments = Bound(phi, 1.0, 1.0, clip=0.6).arguments
        out = _phi_body(z, 0.5, phi, *arguments)
        (slope,) = torch.autograd.grad(out, z, torch.ones_like(z))
        found = _gradient_body(torch.ones_like(z), z.detach(), 0.5, phi, *arguments)
        assert torch.allclose(found, slope, rtol=1e-12, atol=1e-12), phi


COMPILED = ("build bfloat16", "build float32", "contract bfloat16", "contract float32")


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory) -> dict:
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no compiler for NVIDIA's GPUs")
    cache = str(tmp_path_factory.mktemp("triton"))
    return run_alone("triton_compiles.py", TRITON_CACHE_DIR=cache, TRITON_DEFAULT_FP_FUSION="1")


@pytest.mark.parametrize("kernel", COMPILED)
def test_the_kernels_compile_for_tensor_cores_and_fit(kernel, machine_code):
    code = machine_code[kernel]
    assert code["shared"] <= 227 * 1024, "a block's shared memory at compute capability 9.0"
    assert code["local"] <= 64, "registers spill (32 bytes are the range reduction of sine)"
    assert code["tensor cores"]
