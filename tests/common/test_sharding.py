"""Two processes that split parameters (FSDP2, gloo) train what one process trains."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.bounded.files import load_adapter
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.launch import make_sharded

PROGRAM = Path(__file__).with_name("sharded_runs.py")
RUNS = (
    "full",
    "bounded",
    "plain_lora",
    "penalised",
    "resumed",
    "text",
    "text_bounded",
    "double",
    "llama_double",
)
COARSER = (
    ("single", "double"),
    ("low", "single"),
    ("llama_single", "llama_double"),
    ("llama_low", "llama_single"),
    ("llama_whole_low", "llama_whole_single"),
    ("text_single", "text"),
    ("text_low", "text_single"),
)
"""A run, and the same one in the next finer precision."""
LAUNCH = {
    "ACCELERATE_USE_CPU": "true",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}
SPLIT = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def launch(folder: Path, *names: str, count: int = 2, split: bool = True, **given: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root / "src"), str(root)))
    ranks, all_of_them = [], {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    for rank in map(str, range(count)):
        more = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, "PYTHONPATH": path}
        command = [sys.executable, str(PROGRAM), str(folder), *names]
        env = {**os.environ, **LAUNCH, **(SPLIT if split else {}), **all_of_them, **more, **given}
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=300)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert not any(process.returncode for process in ranks), errors


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(the program as a module, its folder): run by two processes, then by this one."""
    folder = tmp_path_factory.mktemp("sharded")
    spec = importlib.util.spec_from_file_location("sharded_runs", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    launch(folder, *program.RUNS, "begun")
    program.main(folder)
    return program, folder


def outcome(folder, who, name):
    """(weights, logged scalars by step and name) of one process's run."""
    scalars = json.loads((folder / f"{who}.json").read_text())[name]
    assert (scalars["share"] == 1.0) == (who == "one") and scalars["share"] <= 1.0
    assert who == "one" or scalars["share"] < 0.6, "really split"
    rows = {
        (step, key): value
        for step, row in scalars["rows"].items()
        for key, value in row.items()
        if not key.startswith(("loss/", "logits/"))  # of this process's samples
    }
    return load_file(folder / f"{who}-{name}.safetensors"), rows


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUNS, *(name for name, _ in COARSER)])
def test_both_processes_end_with_the_same_bits(runs, name):
    _, folder = runs
    first, second = (load_file(folder / f"{rank}-{name}.safetensors") for rank in "01")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


WHOLE = ("full", "bounded", "text")


@pytest.mark.slow
def test_processes_with_whole_models_train_what_one_trains(runs, tmp_path):
    """In float64, at equal batch size, evaluation in training included."""
    launch(tmp_path, *WHOLE, split=False)
    alone = runs[1]
    before = json.loads((alone / "one.json").read_text())
    after = json.loads((tmp_path / "0.json").read_text())
    for name in WHOLE:
        weights = load_file(alone / f"one-{name}.safetensors")
        for rank in range(2):
            own = load_file(tmp_path / f"{rank}-{name}.safetensors")
            for key, tensor in weights.items():
                assert torch.allclose(own[key], tensor, rtol=0, atol=1e-6), (name, key)
        for step, row in before[name]["rows"].items():
            common = {k: v for k, v in row.items() if not k.startswith(("loss/", "logits/"))}
            assert {k: after[name]["rows"][step][k] for k in common} == pytest.approx(common, 1e-6)
    assert any("evaluation/logit" in row for row in before["bounded"]["rows"].values())


def distance(mine, other):
    """Largest difference of weights, and largest relative one of scalars."""
    assert mine[0].keys() == other[0].keys() and mine[1].keys() == other[1].keys()
    weights = max(float((mine[0][key].double() - other[0][key]).abs().max()) for key in mine[0])
    return weights, max(
        abs(mine[1][key] - value) / max(abs(value), 1e-6) for key, value in other[1].items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_split_training_equals_whole_training(runs, name):
    _, folder = runs
    one, first = (outcome(folder, who, name) for who in ("one", 0))
    weights, scalars = distance(first, one)
    assert weights < 1e-12
    assert scalars < 1e-6, "norms are summed in float32"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "finer"), COARSER)
def test_split_training_rounds_as_whole_training_does(runs, name, finer):
    """Both round one exact run: how far whole training is from it says how far they may differ.

    Twice that if splitting rounds as much; four times leaves room for rounding three times as much.
    """
    _, folder = runs
    one, first = (outcome(folder, who, name) for who in ("one", 0))
    found, rounding = distance(first, one), distance(one, outcome(folder, "one", finer))
    assert found[0] <= 4 * rounding[0] and found[1] <= 4 * rounding[1]


@pytest.mark.slow
def test_a_checkpoint_gathers_nothing(runs):
    """Each process writes and reads its own part; the whole model is gathered to be looked at."""
    for rank in "01":
        gathered = json.loads((runs[1] / f"{rank}.json").read_text())["resumed"]["gathered"]
        assert gathered["save"] == gathered["restore"] == 0 < gathered["_fill"]


@pytest.mark.slow
def test_bfloat16_products_gather_bfloat16_matrices(runs):
    low, single = (
        json.loads((runs[1] / "0.json").read_text())[name]["gathered"]["forward"]
        for name in ("llama_whole_low", "llama_whole_single")
    )
    assert 0 < low < 0.6 * single, "norms, embedding and head stay float32"


@pytest.mark.slow
def test_parts_in_main_memory_train_the_same(runs, tmp_path):
    """FSDP's CPU offload, whose parts lie there anyway on this machine."""
    launch(tmp_path, "full", "bounded", FSDP_OFFLOAD_PARAMS="true")
    for name in ("full", "bounded"):
        weights, scalars = distance(outcome(tmp_path, 0, name), outcome(runs[1], "one", name))
        assert weights < 1e-12 and scalars < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("count", "split"), [(1, False), (4, True)])
def test_another_number_of_processes_goes_on(runs, tmp_path, count, split):
    """From the checkpoint of two that were stopped."""
    folder = shutil.copytree(runs[1], tmp_path / "moved")
    parts = list(folder.glob("moved.parts-2/*.safetensors"))
    assert len(parts) == 2 and max(p.stat().st_size for p in parts) < 1.5 * min(
        p.stat().st_size for p in parts
    )
    launch(folder, "ended", count=count, split=split)
    rows = json.loads((folder / "0.json").read_text())["ended"]["rows"]
    assert sorted(rows) == ["3", "4"], "resumed"
    whole = load_file(runs[1] / "one-resumed.safetensors")
    for rank in range(count):
        found = load_file(folder / f"{rank}-ended.safetensors")
        assert max(float((found[key] - whole[key]).abs().max()) for key in whole) < 1e-12
    assert not list(folder.glob("moved.parts-2")), "the parts of the last checkpoint alone"


@pytest.mark.slow
def test_a_damaged_part_starts_the_training_again(runs, tmp_path):
    folder = shutil.copytree(runs[1], tmp_path / "damaged")
    part = sorted(folder.glob("moved.parts-2/*.safetensors"))[1]
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    launch(folder, "ended")
    rows = json.loads((folder / "0.json").read_text())["ended"]["rows"]
    assert sorted(rows) == ["1", "2", "3", "4"]


@pytest.mark.slow
def test_a_saved_adapter_loads_in_one_process(runs, tiny):
    program, folder = runs
    trained = load_file(folder / "one-bounded.safetensors")
    for rank in "01":
        model = tiny.net()
        load_adapter(model, folder / f"adapter-{rank}")
        for key, value in model.state_dict().items():
            rounding = 1e-7 if key.endswith((".A", ".Bt")) else 0  # loaded as float32
            torch.testing.assert_close(value.double(), trained[key], rtol=0, atol=rounding)
        start = program.adapted().state_dict()
        moved = {
            key
            for key, value in model.state_dict().items()
            if not torch.equal(value.double(), start[key].double())
        }
        assert moved == {key for key in start if key.endswith((".A", ".Bt"))}


def test_one_process_never_splits(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert make_sharded(nn.Linear(2, 2), FitConfig(steps=1)) is None


@pytest.mark.parametrize(
    ("setting", "fields", "message"),
    [
        ({"FSDP_VERSION": "1"}, {}, "launch with --fsdp_version 2"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "model's own gradient checkpointing"),
        (
            {
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "Blok",
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            },
            {},
            "no layer of class 'Blok'",
        ),
        (
            {"FSDP_MIN_NUM_PARAMS": "100", "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
            {},
            "TRANSFORMER_BASED_WRAP",
        ),
        ({}, {"probe_every": 1}, "probe_every: 0"),
        ({}, {"mixed_precision": "fp16"}, "bf16"),
        ({}, {"optimizer": "adamw_8bit"}, "optimizer: adamw"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(monkeypatch, setting, fields, message):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for name, value in {**SPLIT, "FSDP_AUTO_WRAP_POLICY": "NO_WRAP", **setting}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        make_sharded(nn.Linear(2, 2), FitConfig(steps=1, **fields))
