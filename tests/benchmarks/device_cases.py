"""Both arms on a device that is none: for ``tests/test_devices.py``, in processes of its own."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from pretend_device import MEETINGS, NAME, DevicesMeet

from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.checks.methods import _short_config
from stable_forgetting.common.checks.tiny_task import VectorSource, problem_of
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.methods.tools import fila
from stable_forgetting.common.methods.variants import ROWS as VARIANTS
from stable_forgetting.vision.data.source import ImageSource

OWN = [name for name in METHODS.names() if name not in {*VARIANTS, "fisher", "novo"}]
OWN += ["gd_sine", "gd_relu", "loku"]
"""Methods with a class of their own, but for two: they multiply a vector by a matrix, and torch
squeezes the result in place, which no wrapper can follow.  Of those that are another method through
an adapter a few."""
ROWS = {"original": None, "retrain": None, "gd_sine": None}


def there(*values: float) -> torch.Tensor:
    return torch.tensor(values, device=NAME)


@pytest.mark.parametrize(
    "meet",
    [
        lambda here: here + torch.ones(2),
        lambda here: torch.ones(2).add_(here),
        lambda here: torch.tensor(0.0).add_(here[0]),
        lambda here: torch.stack([here[0], torch.tensor(1.0)]),
        lambda here: torch.nn.functional.linear(here, torch.ones(3, 2)),
        lambda here: torch.ones(2)[there(0, 1).long()],
        lambda here: torch.where(torch.tensor([True, False]), here, 0.0),
        lambda here: torch.rand(2, device=NAME, generator=torch.Generator()),
        lambda here: here.numpy(),
        lambda here: setattr(here, "data", torch.ones(2)),
        lambda here: here.kthvalue(1),
        lambda here: here.scatter_reduce(0, there(0, 0).long(), here, "sum"),
    ],
)
def test_what_cuda_refuses_is_refused(meet):
    with pytest.raises((DevicesMeet, RuntimeError)):
        meet(there(1, 2))
    assert len(MEETINGS) == 1 and "device_cases.py" in MEETINGS.pop()


def test_what_cuda_allows_is_allowed():
    here = there(1, 2)
    assert (here * torch.tensor(2.0)).cpu().tolist() == [2, 4]
    assert here[torch.tensor([1])].tolist() == [2]
    assert torch.ones(2).copy_(here).device.type == "cpu"
    assert here.clone().copy_(torch.ones(2)).device.type == NAME
    assert torch.zeros_like(here, device="cpu").device.type == "cpu"
    assert float(here.sum()) == 3


class VectorsThere(VectorSource):
    """The contract check's vectors, moved after they were made."""

    def fetch(self, indices, *, augment=None):
        batch = super().fetch(indices, augment=augment)
        return Batch({"x": batch.inputs["x"].to(NAME)}, batch.labels.to(NAME), indices)


def moved(source):
    """A source of pixels or tokens that makes its batches on the device."""
    source = copy.copy(source)
    for name, value in vars(source).items():
        if isinstance(value, torch.Tensor):
            setattr(source, name, value.to(NAME))
    source.device = torch.device(NAME)
    return source


@pytest.mark.parametrize("name", OWN, ids=lambda name: f"{METHODS[name].info.modality}-{name}")
def test_no_method_mixes_devices(name):
    """On the tiny problem of the contract check, trained on the CPU and moved."""
    cls = METHODS[name]
    problem = copy.copy(problem_of(cls.info.modality))
    source, net = problem.source, problem.net
    model = copy.deepcopy(problem.original).to(NAME)
    problem.source = VectorsThere if not cls.info.modality else lambda: moved(source())
    problem.net = lambda: net().to(NAME)
    layout = "class" if cls.info.scenarios == {"class"} else "random"
    task = problem.task(model, layout, 1, cls.info.access)
    unlearned = cls(_short_config(name, cls, {})).unlearn(task)
    assert {parameter.device.type for parameter in unlearned.parameters()} == {NAME}
    assert problem.outputs(unlearned).device.type == NAME


def test_one_fisher_of_two_lies_on_the_device(monkeypatch):
    """Both together are four times a model in bfloat16, beside it and its gradient."""
    whole, made = fila.fisher_information, []

    def seen(*args):
        assert all(total() is None for fisher in made for total in fisher), "the first has left it"
        found = whole(*args)
        assert {total.device.type for total in found.values()} == {NAME}
        made.append([weakref.ref(total) for total in found.values()])
        return found

    monkeypatch.setattr(fila, "fisher_information", seen)
    test_no_method_mixes_devices("loku")
    assert len(made) == 2


@pytest.mark.parametrize("make", ["tiny_suite", "tiny_text_suite"])
def test_a_suite_runs_from_data_to_metrics(make, request, cli, tmp_path):
    path = request.getfixturevalue(make)(tmp_path, methods=ROWS, defaults={"steps": 1})
    done = cli("run", path, "--store", tmp_path / "store")
    assert done.code == 0 and not MEETINGS, done.err


def test_a_missing_copy_to_the_device_is_seen(tiny_suite, cli, tmp_path, monkeypatch):
    """The same run passes without the mutation: labels that stay where they were read."""
    path = tiny_suite(tmp_path, methods=ROWS, defaults={"steps": 1})
    run = ("run", path, "--only", "original", "--store")
    done = cli(*run, tmp_path / "right")
    assert done.code == 0 and not MEETINGS, done.err
    fetch = ImageSource.fetch

    def mutated(self, indices, *, augment=None):
        batch = fetch(self, indices, augment=augment)
        return batch.with_labels(batch.labels.cpu())

    monkeypatch.setattr(ImageSource, "fetch", mutated)
    done = cli(*run, tmp_path / "wrong")
    assert done.code == 1 and "DevicesMeet" in done.err
    assert "cross_entropy" in "".join(MEETINGS)
    MEETINGS.clear()
