"""The questions to a GPU, most telling first, and what each of them is given."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 600.0
"""Seconds that an item may take."""
Row = Mapping[str, Any]
"""One row of an item's table; ``ok: False`` says that a promise does not hold."""


@dataclass(frozen=True)
class Job:
    """How an item is run.

    Attributes:
        work: Folder for stores and models; a later run of the item goes on from there.
        device: Torch device name.
        tiny: Sizes that a CPU does in seconds.
        data_root: Where local data lie, if anywhere.
        seconds: Wall time that is left.
    """

    work: Path
    device: str
    tiny: bool = False
    data_root: Path | None = None
    seconds: float = LIMIT


class Item(NamedTuple):
    """One question.

    Attributes:
        shows: What the table answers.
        minutes: Wall time on one card of 80 to 140 GB.
        basis: Where the minutes are from.
        place: ``module:function``, which yields rows for a :class:`Job`.
    """

    shows: str
    minutes: float
    basis: str
    place: str

    def rows(self, job: Job) -> Iterator[Row]:
        """Runs it; torch is imported here at the earliest."""
        module, _, name = self.place.partition(":")
        run: Callable[[Job], Iterator[Row]]
        run = getattr(importlib.import_module(f"tools.gpu.{module}"), name)
        return run(job)


ITEMS: Mapping[str, Item] = {
    "kernels": Item(
        "Triton's kernels against float64: output and gradients of every phi, rank and type",
        2,
        "measured beside six other items: 94 s",
        "speed:kernels",
    ),
    "steps": Item(
        "full training steps and their memory: ours, PEFT, eager path and the floor; the goal",
        2,
        "measured: 75 s",
        "speed:steps",
    ),
    "compiled": Item(
        "full training steps under `torch.compile`: ours and the eager merged layer, beside PEFT",
        4,
        "measured before ours was compiled, too: 103 s; not measured since",
        "speed:compiled",
    ),
    "rehearsals": Item(
        "every row of both arms takes its first and last steps on the device and is evaluated",
        4,
        "measured beside six other items: 216 s for 225 rows",
        "runs:rehearsals",
    ),
    "layers": Item(
        "one layer, forward and backward: the models' shapes, ranks 4-32, float32 and bfloat16",
        4,
        "measured: 128 s",
        "speed:layers",
    ),
    "bits": Item(
        "run, attack, sweep and apply again: same seed, same bits",
        2,
        "measured beside other items: 100 s",
        "runs:bits",
    ),
    "kills": Item(
        "attack, run, apply and sweep after kill -9 at random times: same seed, same bits",
        7,
        "measured: 229 s of 340; each of four jobs is killed for an eighth of what is left",
        "runs:kills",
    ),
    "processes": Item(
        "two workers on one card, and `accelerate launch` with one process: equal results",
        2,
        "measured beside six other items: 78 s",
        "runs:processes",
    ),
    "precision": Item(
        "bf16 and fp16 against float32 on a table that is known from a CPU (digits-class)",
        4,
        "measured beside six other items: 195 s",
        "runs:precision",
    ),
    "llama": Item(
        "LLaMA-2-7B's shape through fine-tuning, unlearning and evaluation: seconds and memory",
        4,
        "measured beside six other items: 197 s",
        "runs:llama",
    ),
    "profile": Item(
        "where the time of a step of LLaMA's shape goes: the longest kernels, ours and PEFT's",
        1,
        "measured: 9 s",
        "speed:profile",
    ),
    "tests": Item(
        "the test suite where --device auto is the GPU",
        5,
        "measured beside other items: 284 s over twelve processes",
        "runs:tests",
    ),
    "cifar": Item(
        "cifar10-scratch-all, one sitting; run again until the table is complete",
        10,
        "a sitting is cut off; `unlearn plan cifar10-scratch-all` derives the hours of all",
        "runs:cifar",
    ),
    "transfer": Item(
        "cifar10-transfer-vit-s: a pretraining on CIFAR-100, ten tuned rows, five seeds",
        10,
        "measured beside two other trainings: 720 s, so the second sitting ends it",
        "runs:transfer",
    ),
    "tofu": Item(
        "tofu-small with a GPT-Neo of 90 million parameters on all 200 authors, one sitting",
        10,
        "a sitting is cut off",
        "runs:tofu",
    ),
    "tdec": Item(
        "tdec-90m: TDEC's texts learnt by a GPT-Neo of 90 million parameters, one sitting",
        10,
        "measured, in pieces: some 400 s",
        "runs:tdec",
    ),
}
