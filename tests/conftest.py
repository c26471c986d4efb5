"""Tiny models and data for all tests, one thread, and no way out to the network.

Test modules cannot import each other (pytest's importlib mode), so the helpers come as fixtures:
``tiny`` is a namespace of everything below, tests/suites.py has what benchmarks and tools share.

``make test`` leaves out what is marked ``slow``; ``make test-all`` runs everything.  Marked are:

* tools/test_faults: the campaign, and the second death of a worker (the first is always tested);
* tools/test_perf: every benchmark once, tiny; tools/test_gpu: every item but the kernels;
* benchmarks/test_launched, common/test_sharding: two and four launched processes;
* benchmarks/test_resume: two runs side by side (a killed run is always tested);
* benchmarks/test_rehearse: every suite for a GPU, and the longest schedule;
* benchmarks/test_suite: keys of all suites in another process (of every eighth always);
* benchmarks/test_shipped: four more widths; benchmarks/test_sizes: real architectures;
* test_devices: two devices, jobs in processes of their own (not Fisher and NOVO, see its cases);
* language/test_probes: lm-eval's own command.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("COLUMNS", None)  # where tests run in several processes it is 80

import contextlib
import hashlib
import ipaddress
import itertools
import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stable_forgetting.common.base.seeding import derive, generator
from stable_forgetting.common.data.access import DataAccess
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.data.splits import ForgetSplit, class_forget
from stable_forgetting.common.methods.task import UnlearnTask
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.protocols import Hooks, Telemetry

pytest_plugins = ("tests.suites",)
LOCAL_NAMES = {"localhost", "localhost.localdomain", "", None}


def _is_local(host: object) -> bool:
    if host in LOCAL_NAMES or host == socket.gethostname():
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Connecting to, or even asking for, an address that is not this machine's raises."""

    def refuse(host: object) -> None:
        if not _is_local(host):
            raise OSError(f"tests have no network: refused to reach {host!r}")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            real = getattr(socket.socket, name)

            def guarded(self, address, real=real):
                if self.family in (socket.AF_INET, socket.AF_INET6):
                    refuse(address[0])
                return real(self, address)

            patch.setattr(socket.socket, name, guarded)
        resolve = socket.getaddrinfo

        def guarded_resolve(host, *args, **kwargs):
            refuse(host.decode() if isinstance(host, bytes) else host)
            return resolve(host, *args, **kwargs)

        patch.setattr(socket, "getaddrinfo", guarded_resolve)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Same bits on every machine, and room for others on this one."""
    torch.set_num_threads(1)


class TinyMlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


class TinyBlock(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = TinyMlp(width, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class TinyNet(nn.Module):
    """(N, 6) or (N, T, 6) -> logits of 4 classes; layers are named as in a vision transformer."""

    def __init__(self, dropout: float = 0.0, batch_norm: bool = False):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([TinyBlock(8, 12, dropout) for _ in range(2)])
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TARGETS = {
    "mlp": ("blocks.*.mlp.fc*",),
    "attention": ("stem",),
    "all": ("blocks.*.mlp.fc*", "stem"),
}
CLASSES = 4


def make_net(seed: int = 0, **fields) -> TinyNet:
    """A net whose every bit follows from the seed; the global stream is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyNet(**fields)


class VectorSource:
    """Gaussian vectors around class centres; ``forbidden`` indices raise when fetched.

    Attributes:
        fetched: Every index that was ever asked for.
        log: The index tensors in order.
    """

    def __init__(self, size: int = 64, *, noise: float = 0.6, forbidden=()):
        stream = generator(7, "tiny", "source")
        centres = torch.randn(CLASSES, 6, generator=stream)
        self.labels = torch.arange(size) % CLASSES
        self.x = centres[self.labels] + noise * torch.randn(size, 6, generator=stream)
        self.forbidden = {int(index) for index in forbidden}
        self.fetched: set[int] = set()
        self.log: list[Tensor] = []

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.x.numpy().tobytes()).hexdigest()

    def fetch(self, indices: Tensor, *, augment: torch.Generator | None = None) -> Batch:
        touched = set(indices.tolist())
        poisoned = touched & self.forbidden
        if poisoned:
            raise PermissionError(f"poisoned samples {sorted(poisoned)} were read")
        self.fetched |= touched
        self.log.append(indices.clone())
        x = self.x[indices]
        if augment is not None:
            x = x + 0.05 * torch.randn(x.shape, generator=augment)
        return Batch({"x": x}, self.labels[indices], indices)


def make_split(source: VectorSource, size: int = 48) -> ForgetSplit:
    """Class 1 of the first ``size`` samples is forgotten; the rest is split evenly."""
    train = np.arange(size, dtype=np.int64)
    forget = class_forget(train, source.labels.numpy(), [1])
    rest = np.arange(size, len(source.labels), dtype=np.int64)
    parts = {
        "forget": forget,
        "retain": np.setdiff1d(train, forget),
        "validation": rest[::2],
        "test": rest[1::2],
    }
    return ForgetSplit("tiny", parts, source.digest)


def forward(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch.inputs["x"])


def component_of(name: str) -> str:
    return "mlp" if ".mlp." in name else "head" if name.startswith("head") else "other"


def make_loader(source, indices, batch_size: int = 8, *names, augment: bool = False) -> Loader:
    indices = np.asarray(indices, dtype=np.int64)
    stream = generator(3, "loader", *names)
    return Loader(source, indices, batch_size, stream, augment=augment)


HOOKS = frozenset({"after_step", "penalty", "stateful", "stop_when"})
TELEMETRY = frozenset({"tracker", "progress", "evaluate_during", "component_of"})


def wired(**options) -> dict:
    """Arguments of ``fit`` or of a task: hooks and telemetry picked out of flat options."""
    hooks, looks = (
        {k: options.pop(k) for k in kind & options.keys()} for kind in (HOOKS, TELEMETRY)
    )
    if hooks:
        options["hooks"] = Hooks(**hooks)
    if looks:
        options["telemetry"] = Telemetry(**looks)
    return options


def make_family(**fields) -> SimpleNamespace:
    """What is known of the tiny net; ``fields`` override."""
    known = {"forward": forward, "num_classes": CLASSES, "targets": TARGETS, "head": ("head.*",)}
    known["layers"] = ()
    return SimpleNamespace(**{**known, "component_of": component_of, **fields})


def make_task(source, split, *, access=frozenset(), seed: int = 5, **fields) -> UnlearnTask:
    """A task on the tiny problem; ``fields`` override."""
    values = {
        "model": make_net(1),
        "family": make_family(),
        "recipe": FitConfig(steps=20, batch_size=8, lr=1e-2),
        "build": lambda: make_net(derive(seed, "build") % 2**31),
        **wired(**fields),
    }
    task = UnlearnTask(
        data=DataAccess(source, split, access),
        seed=seed,
        **values,
    )
    task.raw = source  # tests look behind the guard
    return task


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(first, second) -> bool:
    """Two state dicts (or modules) bit for bit."""
    first = first if isinstance(first, dict) else snapshot(first)
    second = second if isinstance(second, dict) else snapshot(second)
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) and value.dtype == second[name].dtype
        for name, value in first.items()
    )


# Golden problems: the same numbers on every processor and with every version of torch -------------


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Every new floating tensor is float64 inside: rounding stays far below a golden tolerance."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def fixed_values(name: str, *shape: int) -> Tensor:
    """U[-1, 1) in float64 from a hash of ``name``: exact, and of no library's generator."""
    raw = hashlib.shake_256(name.encode()).digest(8 * math.prod(shape))
    words = np.frombuffer(raw, dtype="<u8") >> np.uint64(11)
    return torch.from_numpy(words.astype(np.float64) * 2.0**-52 - 1).view(shape)


@torch.no_grad()
def set_fixed_(model: nn.Module, name: str = "net") -> nn.Module:
    """Sets every parameter from :func:`fixed_values`, in the scale of torch's default start."""
    for key, parameter in model.named_parameters():
        values = fixed_values(f"{name}/{key}", *parameter.shape)
        if parameter.ndim > 1:
            parameter.copy_(values / math.sqrt(parameter[0].numel()))
        else:
            parameter.copy_(0.1 * values + float(key.endswith("weight")))
    return model


class FixedDropout(nn.Module):
    """Scales units by fixed factors in training, so that a student differs from its teacher.

    Where they are equal, SCRUB climbs from the minimum of its divergence, and rounding alone
    decides which way.
    """

    def __init__(self, width: int):
        super().__init__()
        self.factors = 1 + 0.2 * fixed_values("dropout", width)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors if self.training else x


def make_golden_net(name: str = "net") -> nn.Module:
    """As :class:`TinyNet`; weights and dropout are fixed, in float64."""
    model = TinyNet()
    for block in model.blocks:
        block.drop = FixedDropout(8)
    return set_fixed_(model, name)


def make_golden_source(noise: float) -> VectorSource:
    """As :class:`VectorSource`; the vectors are fixed, in float64."""
    source = VectorSource(noise=noise)
    centres = fixed_values("centres", CLASSES, 6)
    spread = fixed_values("spread", len(source.labels), 6)
    source.x = 3**0.5 * (centres[source.labels] + noise * spread)
    return source


@pytest.fixture(scope="session")
def golden() -> SimpleNamespace:
    """What golden losses are computed with."""
    return SimpleNamespace(
        float64=float64,
        values=fixed_values,
        set_=set_fixed_,
        net=make_golden_net,
        source=make_golden_source,
    )


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """Everything tiny: nets, data, loaders, tasks."""
    return SimpleNamespace(
        Net=TinyNet,
        Source=VectorSource,
        net=make_net,
        split=make_split,
        forward=forward,
        component_of=component_of,
        loader=make_loader,
        task=make_task,
        family=make_family,
        wired=wired,
        snapshot=snapshot,
        same=same,
        targets=TARGETS,
        classes=CLASSES,
    )


GOLDEN_TOLERANCE = 1e-7


def _check_golden(path: Path, found: Mapping[str, Mapping[str, float]]) -> None:
    if os.environ.get("SF_REGENERATE"):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    golden = json.loads(path.read_text(encoding="utf-8"))
    assert list(golden) == list(found), "new or renamed: see the module docstring"
    for name, values in golden.items():
        assert found[name] == pytest.approx(values, rel=GOLDEN_TOLERANCE, abs=0), name


@pytest.fixture(scope="session")
def check_golden() -> Callable[..., None]:
    """Compares name -> value by name with a JSON file; SF_REGENERATE=1 writes it first.

    Float64 on other processors and versions of torch differs by less than a tenth of the relative
    tolerance.
    """
    return _check_golden


def _golden_twins(path: Path) -> set[tuple[str, str]]:
    golden = json.loads(path.read_text(encoding="utf-8"))
    return {
        (one, two)
        for one, two in itertools.combinations(golden, 2)
        if golden[one] == pytest.approx(golden[two], rel=3 * GOLDEN_TOLERANCE, abs=0)
    }


@pytest.fixture(scope="session")
def golden_twins() -> Callable[[Path], set[tuple[str, str]]]:
    """Pairs of names of a golden file whose values all lie within three tolerances."""
    return _golden_twins
