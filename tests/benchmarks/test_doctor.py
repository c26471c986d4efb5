from __future__ import annotations

import builtins
import importlib.metadata
import shutil
import socket
from types import SimpleNamespace

import pytest
import torchvision

from stable_forgetting.benchmarks.machine import doctor


def refuse(*_args, **_kwargs):
    raise OSError("unreachable")


@pytest.fixture
def examine(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def run(**over):
        found = doctor.examine(**{"store": tmp_path / "runs", "data_root": None, **over})
        for finding in found:
            assert finding.verdict in ("ok", "note", "bad") and finding.detail
            assert (finding.verdict == "ok") == (finding.mend == ""), finding
        return {finding.name: finding for finding in found}

    return run


def test_this_machine_is_ready(examine, tmp_path):
    found = examine()
    for name in ("torch + torchvision", "timm", "accelerate", "threads", "disk"):
        assert found[name].verdict == "ok", found[name]
    assert found["data root"].verdict == "note" and "--data-root" in found["data root"].mend
    assert found["model hub"].verdict == "note" and "checkpoint" in found["model hub"].mend
    assert not (tmp_path / "runs").exists(), "looking changes nothing"


def test_hub(examine, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "unset it" in examine()["model hub"].mend
    monkeypatch.delenv("HF_HUB_OFFLINE")
    closed = []
    connection = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(socket, "create_connection", lambda *_a, **_k: connection)
    assert examine()["model hub"].verdict == "ok" and closed == [True]


def test_data_root(examine, tmp_path):
    missing = examine(data_root=tmp_path / "nowhere")["data root"]
    assert missing.verdict == "bad" and missing.mend == "correct --data-root"
    empty = examine(data_root=tmp_path)["data root"]
    assert empty.verdict == "note" and "parquet" in empty.mend
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train-0.parquet").touch()
    good = examine(data_root=tmp_path)["data root"]
    assert good.verdict == "ok" and good.detail.startswith(f"{tmp_path}: cifar10; not there: ")
    (tmp_path / "tofu").mkdir()
    (tmp_path / "tofu" / "full.jsonl").touch()
    for name in ("tdec", "muse", "reasoning"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").touch()
    every = examine(data_root=tmp_path)["data root"].detail
    assert every == f"{tmp_path}: cifar10, tofu, tdec, muse, reasoning; not there: cifar100"


def test_store_that_cannot_be_written(examine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for store in (tmp_path / "file", tmp_path / "file" / "below"):
        found = examine(store=store)["disk"]
        assert found.verdict == "bad" and "not a folder" in found.detail
        assert found.mend == "choose another --store"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    found = examine()["disk"]
    assert found.verdict == "bad" and "cannot be written" in found.detail
    assert found.mend == "choose another --store"


def test_full_disk(examine, monkeypatch):
    usage = SimpleNamespace(total=2**40, used=2**40, free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = examine()["disk"]
    assert found.verdict == "bad" and "free some space" in found.mend


def test_torch_and_torchvision_do_not_match(examine, monkeypatch):
    def missing(*_):
        raise RuntimeError("operator torchvision::nms does not exist\nsecond line")

    monkeypatch.setattr(torchvision.ops, "nms", missing)
    found = examine()["torch + torchvision"]
    assert found.verdict == "bad" and "second line" not in found.detail
    assert "not a matched pair" in found.mend and "pip install" in found.mend


def test_torch_does_not_import(examine, monkeypatch):
    real = builtins.__import__

    def broken(name, *args, **kwargs):
        if name.split(".")[0] in ("torch", "torchvision"):
            raise ImportError("libcudart.so.12: cannot open shared object file")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    found = examine()
    assert found["torch + torchvision"].verdict == "bad"
    assert "libcudart" in found["torch + torchvision"].detail
    assert "pip install" in found["torch + torchvision"].mend
    assert found["device"].verdict == "bad"


def test_missing_package(examine, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "timm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert examine()["timm"].mend == "pip install timm"


def test_command_prints_each_mend_and_fails_on_bad_ones(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "create_connection", refuse)
    good = cli("doctor", "--store", tmp_path / "runs")
    bad = cli("doctor", "--store", tmp_path / "runs", "--data-root", tmp_path / "nowhere")
    assert bad.code == 1 and "-> correct --data-root" in bad.out
    assert good.code == (1 if "bad  " in good.out else 0)
    assert good.out.count("->") >= 2 and good.err == bad.err == ""
