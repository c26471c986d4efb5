"""Suites mutated at random, and files that were made to hurt: one clear line each, and soon."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image
from safetensors.torch import load_file, save_file

from tools.faults.child import Ended, command
from tools.faults.trials import Tally
from tools.faults.world import SUITE, World

LIMIT = 30.0
"""Seconds of wall time after which an answer is late."""
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, float("nan"), 10**30, "", "x", "no", "../..", [], {}, [[]], ["x"],
    {"x": 1}, "1e-3", "\u202e", "a" * 300, [1] * 50,
)  # fmt: skip


def fuzz(world: World, random: Random, tally: Tally) -> None:
    """Plans a suite with a few random changes."""
    folder = world.root / "fuzz"
    folder.mkdir(exist_ok=True)
    suite = copy.deepcopy(SUITE)
    for _ in range(random.randint(1, 3)):
        _mutate(random, suite)
    text = bytearray(json.dumps(suite).encode())
    if random.random() < 0.3:
        spot = random.randrange(len(text))
        text[spot : spot + random.randint(0, 3)] = random.randbytes(2)
    path = folder / "suite.yaml"
    path.write_bytes(text)
    ended = command(folder / "log", "plan", path, "--store", folder / "store").wait(LIMIT)
    _judge(tally, ended, bytes(text[-200:]).decode(errors="replace"))


def _mutate(random: Random, value: Any) -> None:
    """Changes, drops, renames or adds one thing, at any depth."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = random.choice(keys)
        if not isinstance(value[key], dict | list) or random.random() < 0.25:
            break
        value = value[key]
    way = random.random()
    if way < 0.15:
        del value[key]
    elif way < 0.3 and isinstance(value, dict):
        value[f"{key}{random.choice('sx_ ')}"] = value.pop(key)
    elif way < 0.4 and isinstance(value, dict):
        value[random.choice(("extends", "after", "tune", "folds", "x"))] = copy.deepcopy(
            random.choice(_VALUES)
        )
    else:
        value[key] = copy.deepcopy(random.choice(_VALUES))


def _judge(tally: Tally, ended: Ended, what: str) -> None:
    lines = ended.err.strip().splitlines()
    if ended.traceback:
        tally.note("traceback", f"{what}: {ended.err[-200:]}")
    elif ended.code < 0:
        tally.note("late", f"{what}: no answer after {LIMIT:g} s")
    elif ended.code == 2 and len(lines) == 1:
        tally.note("clear line")
    elif ended.code == 0:
        tally.note("ran")
    else:
        tally.note(f"code {ended.code}", f"{what}: {ended.err[-200:]}")


# Named attacks -----------------------------------------------------------------------------------


def attack(world: World, random: Random, tally: Tally) -> None:
    """Every hostile file once."""
    for number, (name, arguments) in enumerate(_attacks(world)):
        ended = command(world.root / "attacks" / f"log-{number}", *arguments).wait(LIMIT)
        _judge(tally, ended, name)
        tally.breach(f"{name} was taken" if ended.code == 0 else "")


def _attacks(world: World) -> Iterator[tuple[str, list[object]]]:
    folder, text = world.root / "attacks", world.suite.read_text()
    folder.mkdir()
    _write_extending(folder, text)
    texts = {**_TEXTS, "a model of 100,000 blocks": text.replace('"depth": 1', '"depth": 100000')}
    for number, (name, content) in enumerate(texts.items()):
        path = folder / f"suite-{number}.yaml"
        path.write_text(content)
        yield name, ["plan", path, "--store", folder / "store"]
    os.mkfifo(folder / "pipe.yaml")
    yield "a pipe", ["plan", folder / "pipe.yaml", "--store", folder / "store"]
    (folder / "link").symlink_to(folder / "nowhere" / "at-all")
    yield "no name for a store", ["run", world.suite, "--store", folder / "link"]
    yield "a store below a file", ["run", world.suite, "--store", world.suite / "x"]
    yield "more threads than exist", ["run", world.suite, "--threads", "999999999999"]
    for name, spoil in _SUBJECTS.items():
        subject = folder / f"subject-{name}"
        shutil.copytree(world.root / "subject", subject)
        spoil(subject)
        moved = {world.root / "subject" / part: subject / part for part in _PARTS}
        yield name, [moved.get(a, a) for a in world.arguments("apply", subject)]  # type: ignore[call-overload]


def _write_extending(folder: Path, text: str) -> None:
    """Twenty files, each of which extends the next one twice."""
    for number in range(20):
        parent = f"e{number + 1}.yaml"
        (folder / f"e{number}.yaml").write_text(f"extends: [{parent}, {parent}]\nk{number}: 1\n")
    (folder / "e20.yaml").write_text(text)


_PARTS = ("model", "forget", "retain")
_LAUGHS = [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise("abcdefghi")]
_TEXTS = {
    "billion laughs": "\n".join([f"a: &a [{', '.join('x' * 9)}]", *_LAUGHS]),
    "extends twice, twenty deep": "extends: e0.yaml\n",
    "extends a device": "extends: /dev/zero\n",
    "600,000 keys": "".join(f"k{number}: 1\n" for number in range(600_000)),
    "a number of 4,300 digits": f"version: 0x{'f' * 4300}\n",
    "brackets, 100,000 deep": "a: " + "[" * 100_000,
    "a Python object": "suite: !!python/object/apply:os.system ['touch hacked']\n",
}


def _with_image(subject: Path, name: str, mode: str) -> None:
    Image.new(mode, (16, 16), 1000).save(subject / "forget" / "a" / name)


def _as_integers(subject: Path) -> None:
    path = subject / "model" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("qkv.weight"))
    save_file({**tensors, name: tensors[name].char()}, path)


def _config(subject: Path, **values: Any) -> None:
    path = subject / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pretrained_cfg": values}))


_SUBJECTS: dict[str, Callable[[Path], object]] = {
    "a 16-bit image": lambda at: _with_image(at, "deep.png", "I;16"),
    "a float image": lambda at: _with_image(at, "float.tiff", "F"),
    "a pipe named as an image": lambda at: os.mkfifo(at / "forget" / "a" / "x.png"),
    "a link to nowhere among images": lambda at: (at / "forget/a/x.png").symlink_to(at / "none"),
    "weights of integers": _as_integers,
    "a standard deviation that is text": lambda at: _config(at, std=["x"]),
    "a crop of a billionth": lambda at: _config(at, crop_pct=1e-9),
    "weights cut short": lambda at: os.truncate(at / "model" / "model.safetensors", 999),
}
