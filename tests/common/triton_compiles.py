"""Compiles the Triton kernels for compute capability 9.0 (no GPU is needed); prints what they use.

A process of its own, as Triton must not have been imported for its interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stable_forgetting.common.bounded import kernels
from stable_forgetting.common.bounded import triton as ours

TARGET = GPUTarget("cuda", 90, 32)
ALIGNED = ("k", "d", "row_stride")
"""Integers that are multiples of 16 where it matters, beside all pointers."""


def compile_kernel(fn: Any, pointers: dict[str, str], constants: dict[str, Any], tiles: ours.Tiles):
    """Machine code for arguments of these kinds; what is named nowhere is a size or a scale."""
    floats = {"amplitude", "frequency", "scale", "clip"}
    kinds = {name: "fp32" if name in floats else "i32" for name in fn.arg_names}
    kinds |= pointers | dict.fromkeys(constants, "constexpr")
    places = {name: (place,) for place, name in enumerate(fn.arg_names)}
    aligned = [n for n in fn.arg_names if kinds[n].startswith("*") or n in ALIGNED]
    source = ASTSource(
        fn=fn,
        signature=kinds,
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tiles.warps}
    return triton.compile(source, target=TARGET, options=options)


def build(dtype: str) -> Any:
    tiles = ours.BUILD_TILES
    pointers = dict.fromkeys(("A", "Bt", "A0", "Bt0"), "*fp32") | {"weight": dtype, "out": dtype}
    constants = {"PHI": "sine", "EXACT": ours.EXACT, "WEIGHT": True, "START": False}
    constants |= {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "RANK": 16, "column_stride": 1}
    return compile_kernel(kernels.build_kernel, pointers, constants, tiles)


def contract(dtype: str) -> Any:
    tiles = ours.CONTRACT_TILES
    pointers = dict.fromkeys(("A", "Bt", "dA", "dBt"), "*fp32") | {"G": dtype}
    constants = {"PHI": "sine", "EXACT": ours.EXACT, "RANK": 16}
    constants |= {"EPILOGUE": ours.EXACT if dtype == "*fp32" else "tf32"}
    constants |= {"ROWS": tiles.rows, "COLUMNS": tiles.columns}
    return compile_kernel(kernels.contract_kernel, pointers, constants, tiles)


def used(code: Any) -> dict[str, Any]:
    """Bytes of shared memory, and of local memory per thread (its stack and what spills)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack, local = (int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("STACK", "LOCAL"))
    return {
        "shared": code.metadata.shared,
        "local": stack + local,
        "tensor cores": "wgmma.mma_async" in code.asm["ptx"],
    }


def main() -> None:
    found = {}
    for name, kind in (("bfloat16", "*bf16"), ("float32", "*fp32")):
        found[f"build {name}"] = used(build(kind))
        found[f"contract {name}"] = used(contract(kind))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    assert Path(kernels.__file__).is_file() and not kernels.INTERPRETED
    main()
