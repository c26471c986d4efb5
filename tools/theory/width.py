"""Does the bound act at real size?  The largest |omega A B^T| over the steps of an unlearning run.

Adam moves every factor by at most the learning rate per step, so |omega A B^T| can reach
omega r (max|A| + lr T) lr T.  That is 3.4 at rank 8, lr 1e-4 and T = 500 steps for the A of a layer
of width 768, where sine's bound would act.  Nothing but a measurement says whether it does.  A cell
trains a base model, attaches an adapter to its MLPs and runs gradient difference at the paper's
rates: a ViT on scikit-learn's digits (one class forgotten), or a GPT-Neo on random sequences that
it has learnt by heart (a quarter forgotten).  Cells that the folder holds are not run again, and
one that was cut off goes on from its last logged step.

``python -m tools.theory.width --out DIR --widths 64,192 --depths 2``

On a GPU (``--device cuda``) the products of the models are in TF32, each model's step is one CUDA
graph, and ``--together 16`` trains as many models side by side.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from stable_forgetting.benchmarks.report import curves, markdown
from stable_forgetting.benchmarks.report.section import Picture, Section, table
from stable_forgetting.common import AdapterConfig, attach
from stable_forgetting.common.base.seeding import derive, generator
from stable_forgetting.common.bounded.layer import adapted_layers
from stable_forgetting.vision.config import ModelConfig
from stable_forgetting.vision.models.build import build_model
from tools.theory.checkpoint import Checkpoint
from tools.theory.mlp import ACTIVE, optimizer_of

ADAPTERS = {"sine": 100.0, "tanh": 100.0, "control": 100.0}
TARGETS = {"vit": ["blocks.*.mlp.fc*"], "gpt_neo": ["*.mlp.c_fc", "*.mlp.c_proj"]}
RATES = {"adamw": (1e-4, 1.0, 10.0), "sgd": (1.0, 1e-5, 1e-4)}
"""Optimizer -> learning rate, retain weight, forget weight: both readings of the paper's rates."""
BATCH, FIT_STEPS, SEQUENCES, LENGTH, VOCABULARY = 32, 1200, 64, 16, 256
WARM_UP = 1
"""Steps before a graph is captured: kernels are compiled and optimizer states made in them."""

Base = tuple[str, int, int, int]
"""What a base model depends on: family, width, depth and seed."""


@dataclass(frozen=True)
class Cell:
    """One run: what is trained, how, and for how long."""

    family: str
    width: int
    depth: int
    optimizer: str
    adapter: str
    steps: int
    seed: int

    @property
    def base(self) -> Base:
        """Cells of one base start from the same model."""
        return self.family, self.width, self.depth, self.seed

    @property
    def name(self) -> str:
        """All that a cell is, as the name of its files."""
        return "-".join(str(value) for value in asdict(self).values())


def base_model(cell: Cell) -> nn.Module:
    """An untrained model of the cell's size: heads of width 64."""
    seed, heads = derive(cell.seed, "width", cell.family), max(1, cell.width // 64)
    if cell.family == "vit":
        config = ModelConfig(
            image_size=8, patch_size=2, dim=cell.width, depth=cell.depth, heads=heads
        )
        return build_model(config, num_classes=10, in_chans=1, generator_seed=seed)

    torch.manual_seed(seed)
    return GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=VOCABULARY,
            hidden_size=cell.width,
            num_layers=cell.depth,
            num_heads=heads,
            attention_types=[[["global"], cell.depth]],
            max_position_embeddings=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def load_parts(cell: Cell, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """``forget`` and ``retain``: (inputs, labels) on the device, of digits or random sequences."""
    parts = _drawn_parts(cell)
    return {name: (part[0].to(device), part[1].to(device)) for name, part in parts.items()}


def _drawn_parts(cell: Cell) -> dict[str, tuple[Tensor, Tensor]]:
    if cell.family == "gpt_neo":
        order = generator(cell.seed, "width", "texts")
        texts = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=order)
        forgotten = torch.arange(SEQUENCES) < SEQUENCES // 4
        return {
            "forget": (texts[forgotten, :-1], texts[forgotten, 1:]),
            "retain": (texts[~forgotten, :-1], texts[~forgotten, 1:]),
        }

    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16).float()
    labels = torch.tensor(digits.target)
    forgotten = labels == cell.seed % 10
    return {
        "forget": (images[forgotten], labels[forgotten]),
        "retain": (images[~forgotten], labels[~forgotten]),
    }


def losses_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every label, in nats; (labels,)."""
    logits = model(inputs)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")


class Batches:
    """Batches of a part in a drawn order, which a CUDA graph reads on by itself.

    Args:
        part: Inputs and labels.
        steps: Batches there will be.
        order: Draws one permutation of the part after the other.
    """

    def __init__(self, part: tuple[Tensor, Tensor], steps: int, order: torch.Generator):
        self.part, count = part, len(part[1])
        epochs = math.ceil(steps * BATCH / count)
        drawn = torch.cat([torch.randperm(count, generator=order) for _ in range(epochs)])
        self.order = drawn[: steps * BATCH].view(steps, BATCH).to(part[1].device)
        self.at = torch.zeros(1, dtype=torch.int64, device=part[1].device)

    def next(self) -> tuple[Tensor, Tensor]:
        """(inputs, labels) of the next batch."""
        index = self.order.index_select(0, self.at)[0]
        self.at += 1
        return self.part[0][index], self.part[1][index]


class NumbersOnCard(TorchFunctionMode):
    """``torch.tensor(number)`` without a copy from the host, which a graph cannot hold."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes the tensor by filling it."""
        if func is torch.tensor and isinstance(args[0], int | float):
            return torch.full((), *args, **(kwargs or {}))
        if func is torch.tensor and args[0] == []:
            return torch.empty(0, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def trained(
    compute: Callable[[], Tensor], optimizer: torch.optim.Optimizer, device: str
) -> Iterator[Tensor]:
    """Endless steps: the loss of each, after it was taken."""

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = compute()
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield from (step() for _ in range(WARM_UP))
    if device == "cpu":
        while True:
            yield step()

    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()  # on the job's own stream: cuBLAS has a workspace for each
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()), NumbersOnCard():
        loss = step()
    while True:
        graph.replay()
        yield loss


Job = Generator[None, None, Any]
"""Gives way after each step; its value is what it was made for."""


def side_by_side(jobs: Iterable[Job], together: int, device: str) -> Iterator[Any]:
    """The value of each job as it ends; a step of each of ``together`` jobs in turn.

    On a card each job has a stream of its own, so that small kernels run at the same time.
    """
    waiting, running = iter(jobs), list[tuple[Job, Any]]()
    while True:
        for job in islice(waiting, together - len(running)):
            running.append((job, None if device == "cpu" else torch.cuda.Stream()))
        if not running:
            return
        for each in list(running):
            job, stream = each
            try:
                with torch.cuda.stream(stream):
                    next(job)
            except StopIteration as end:
                running.remove(each)
                yield end.value


def fit_base(cell: Cell, device: str) -> Job:
    """The base model, trained on both parts until its loss is below 0.05 nats.

    Its value is (base, model).
    """
    parts = load_parts(cell, device).values()
    model = base_model(cell).train().to(device)
    together = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = generator(cell.seed, "width", "fit")
    batches = Batches((together[0], together[1]), FIT_STEPS, order)
    optimizer = optimizer_of(model, "adamw", min(1e-3, 0.1 / cell.width))
    average = torch.ones((), device=device)
    losses = trained(lambda: losses_of(model, *batches.next()).mean(), optimizer, device)
    for step, loss in enumerate(islice(losses, FIT_STEPS), 1):
        average.mul_(0.9).add_(loss, alpha=0.1)
        yield
        if step % 10 == 0 and float(average) < 0.05:
            break
    optimizer.zero_grad()
    return cell.base, model


def trace(cell: Cell, base: nn.Module, folder: Path, device: str = "cpu") -> Job:
    """Runs a cell on a copy of its base model, or goes on with it; ``folder`` has its checkpoint.

    Its value is the cell with the steps ``logged`` and, at each, :func:`arguments_of`; the losses
    on both parts before and after, and ``seconds``.  It ends at a loss that is not finite.
    """
    began = time.monotonic()
    parts, model = load_parts(cell, device), copy.deepcopy(base)
    before = part_losses(model, parts)
    phi = "identity" if cell.adapter == "control" else cell.adapter
    adapter = AdapterConfig(phi=phi, omega=ADAPTERS[cell.adapter])
    attach(model, TARGETS[cell.family], adapter, generator(cell.seed, "width", "adapter"))
    rate, keep, forget = RATES[cell.optimizer]
    batches = {
        name: Batches(part, cell.steps, generator(cell.seed, "width", "batches", name))
        for name, part in parts.items()
    }

    def compute() -> Tensor:
        drawn = zip(*(batches[name].next() for name in ("retain", "forget")), strict=True)
        kept, forgotten = losses_of(model, *map(torch.cat, drawn)).chunk(2)
        return keep * kept.mean() - forget * forgotten.mean()

    optimizer = optimizer_of(model, cell.optimizer, rate)
    checkpoint = Checkpoint(folder / f"{cell.name}.safetensors", model, optimizer)
    kept = checkpoint.load()
    logged: list[list[float]] = kept.get("logged", [])
    start, spent = kept.get("step", 0), kept.get("seconds", 0.0)
    for part in batches.values():
        part.at.fill_(start)
    losses = trained(compute, optimizer, device)
    for step, loss in enumerate(islice(losses, cell.steps - start), start + 1):
        yield
        if step % max(1, cell.steps // 50) == 0:
            logged.append([step, *arguments_of(model)])
            if not math.isfinite(float(loss)):
                break
            seconds = spent + time.monotonic() - began
            checkpoint.save({"step": step, "logged": logged, "seconds": seconds})
    names = ("logged", "largest", "past_half", "past_peak")
    traces = dict(zip(names, map(list, zip(*logged, strict=True)), strict=True))
    after = {f"{name}_after": value for name, value in part_losses(model, parts).items()}
    seconds = round(spent + time.monotonic() - began, 1)
    shown = {**asdict(cell), **traces, **before, **after}
    return {**shown, "seconds": seconds, "device": torch.device(device).type}


@torch.no_grad()
def arguments_of(model: nn.Module) -> tuple[float, float, float]:
    """(largest, past 0.5, past pi / 2) of |omega A B^T|, to four digits.

    The last two are shares of all entries.
    """
    values = torch.cat([layer.arguments().abs().flatten() for _, layer in adapted_layers(model)])
    half, peak = (float((values > limit).float().mean()) for limit in (ACTIVE, math.pi / 2))
    largest, half, peak = (float(f"{value:.4g}") for value in (float(values.max()), half, peak))
    return largest, half, peak


@torch.no_grad()
def part_losses(model: nn.Module, parts: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Name -> mean loss of at most 256 samples of a part."""
    return {
        f"{name}_loss": float(losses_of(model, *(tensor[:256] for tensor in part)).mean())
        for name, part in parts.items()
    }


def write_report(lines: Sequence[dict[str, Any]], out: Path) -> None:
    """``width.md`` and ``width.svg`` of all measured cells: a line per cell, a panel per family."""
    heads = ["model", "width", "depth", "optimizer", "adapter", "trained for", "seed"]
    heads += ["largest", "past 0.5", "past pi/2", "forget loss", "retain loss", "device"]
    ordered = sorted(lines, key=lambda line: [str(line[n]).zfill(5) for n in FIELDS])
    rows = [_row(line) for line in ordered]
    text = (
        "Gradient difference at the paper's rates on the MLPs of a ViT (digits) and of a GPT-Neo "
        "(random sequences): the largest |omega A B^T| over all logged steps, the largest share of "
        "entries past 0.5 and past pi/2, and the losses in nats before and after. One run each."
    )
    parts = [Section("Does the bound act at real size?", (text,), table(heads, rows), depth=1)]
    drawn = _picture(ordered)
    if drawn is not None:
        (out / "width.svg").write_text(drawn, encoding="utf-8")
        parts.append(Section(content=Picture(drawn, "Largest argument by step", "width.svg")))
    (out / "width.md").write_text(markdown.write(parts), encoding="utf-8")


FIELDS = ("family", "depth", "steps", "optimizer", "adapter", "width", "seed")


def _row(line: dict[str, Any]) -> list[str]:
    losses = [
        f"{line[f'{part}_loss']:.3g} -> {line[f'{part}_loss_after']:.3g}"
        for part in ("forget", "retain")
    ]
    return [
        line["family"],
        *(str(line[name]) for name in ("width", "depth", "optimizer", "adapter", "steps", "seed")),
        f"{max(line['largest']):.3f}",
        *(f"{100 * max(line[name]):.2f} %" for name in ("past_half", "past_peak")),
        *losses,
        line["device"],
    ]


def _picture(lines: Sequence[dict[str, Any]]) -> str | None:
    """The largest argument by step of sine under Adam: a panel per family and depth."""
    panels, names = [], sorted({line["width"] for line in lines})
    steps = max(line["steps"] for line in lines)
    for family, depth in sorted({(line["family"], line["depth"]) for line in lines}):
        drawn = {
            f"width {line['width']}": dict(zip(line["logged"], line["largest"], strict=True))
            for line in lines
            if (line["family"], line["depth"], line["steps"]) == (family, depth, steps)
            and (line["optimizer"], line["adapter"], line["seed"]) == ("adamw", "sine", 1)
        }
        if drawn:
            panels.append(
                curves.Panel(f"{family}, depth {depth}", drawn, (0, steps), f"step {steps}")
            )
    if not panels:
        return None
    title = "Largest |omega A B^T| by step: sine, Adam, the paper's rate"
    return curves.draw(panels, [f"width {width}" for width in names], title)


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    """Runs the asked cells that the folder lacks; ``width.jsonl`` has a line each."""
    parser = argparse.ArgumentParser(prog="python -m tools.theory.width", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", type=_words, default=[*TARGETS])
    parser.add_argument("--widths", type=_numbers, default=[64, 192, 384, 768])
    parser.add_argument("--depths", type=_numbers, default=[2])
    parser.add_argument("--optimizers", type=_words, default=[*RATES])
    parser.add_argument("--adapters", type=_words, default=[*ADAPTERS])
    parser.add_argument("--steps", type=_numbers, default=[500])
    parser.add_argument("--seeds", type=_numbers, default=[1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", type=int, default=1, help="models side by side on a GPU (1)")
    asked = parser.parse_args(arguments)
    if asked.device != "cpu":
        torch.set_float32_matmul_precision("high")
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "width.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {Cell(*(line[each.name] for each in fields(Cell))) for line in lines}
    grid = (asked.seeds, asked.steps, asked.optimizers, asked.adapters)
    sizes = (asked.depths, asked.widths, asked.families)
    cells = [
        cell
        for seed, steps, optimizer, adapter, depth, width, family in product(*grid, *sizes)
        if (cell := Cell(family, width, depth, optimizer, adapter, steps, seed)) not in done
    ]
    fits = [fit_base(cell, asked.device) for cell in {cell.base: cell for cell in cells}.values()]
    bases = dict(side_by_side(fits, asked.together, asked.device))
    traces = (trace(cell, bases[cell.base], asked.out, asked.device) for cell in cells)
    for measured in side_by_side(traces, asked.together, asked.device):
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(measured) + "\n")
        lines.append(measured)
        largest, active = max(measured["largest"]), max(measured["past_half"])
        cell = Cell(*(measured[each.name] for each in fields(Cell)))
        (asked.out / f"{cell.name}.safetensors").unlink(missing_ok=True)
        print(f"{cell}: largest {largest:.3g}, past 0.5: {100 * active:.2f} %", flush=True)  # noqa: T201
    write_report(lines, asked.out)


if __name__ == "__main__":
    main()
