"""The command ``apply``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.command import command
from benchmarks.cli.options import Device, Overrides, Plugins, Threads, console, register_all

SUBJECT_OPTIONS = ("arch", "num_classes", "template", "max_length")
"""Options that one kind of checkpoint knows."""


@dataclass(frozen=True)
class Order:
    """The options of one application."""

    model: Annotated[
        Path,
        typer.Option(
            help="Images: folder (model.safetensors + config.json) or .safetensors file. Text: "
            "folder of a Hugging Face causal LM with its tokenizer, or hub id."
        ),
    ]
    forget: Annotated[
        Path,
        typer.Option(
            help='What to forget: a folder CLASS/x.png, or a .jsonl of {"question", "answer"} or '
            '{"text"} rows.'
        ),
    ]
    method: Annotated[str, typer.Option(help="A method (see: unlearn ls methods).")]
    out: Annotated[Path, typer.Option(help="New folder: merged model, adapter, statement.json.")]
    retain: Annotated[Path | None, typer.Option(help="What to keep, in the same form.")] = None
    test: Annotated[
        Path | None, typer.Option(help="Unseen samples in the same form, for the statement only.")
    ] = None
    preset: Annotated[str | None, typer.Option(help="Preset of the method.")] = None
    set_: Overrides = None
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0
    arch: Annotated[str | None, typer.Option(help="Images: timm name, for a bare file.")] = None
    num_classes: Annotated[int | None, typer.Option(help="Images: classes, for a bare file.")] = (
        None
    )
    template: Annotated[
        str | None,
        typer.Option(help="Text: question_answer (default), llama2_chat or llama3_chat."),
    ] = None
    max_length: Annotated[
        int | None, typer.Option(help="Text: tokens of the longest row (1024).", min=8)
    ] = None
    device: Device = "auto"
    threads: Threads = 1
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Go on where the model is wrong on most forget images."),
    ] = False


@command(
    "unlearn apply --model my_vit/ --forget forget/ --retain retain/ --method gd_sine --out "
    "forgotten/",
    "unlearn apply --model vit.safetensors --arch vit_small_patch16_224 --num-classes 10 --forget "
    "forget/ --method ascent --out out/ --set lr=1e-5",
    "unlearn apply --model my_llm/ --forget forget.jsonl --retain retain.jsonl --test unseen.jsonl "
    "--method gd_sine --out forgotten/ --set batch_size=8",
    "unlearn apply --model meta-llama/Llama-3.1-8B-Instruct --template llama3_chat --forget "
    "forget.jsonl --retain retain.jsonl --method npo_gdr --out forgotten/",
)
def apply(order: Order, plugin: Plugins = None) -> None:
    """Make your own model forget your own images (timm) or texts (Hugging Face causal LM)."""
    register_all(plugin)
    from benchmarks.apply import Application
    from benchmarks.apply import apply as run_apply
    from benchmarks.cli.progress import StepBar

    options = dict(vars(order))
    params = tuple(options.pop("set_") or ())
    subject = {name: options.pop(name) for name in SUBJECT_OPTIONS}
    given = {name: value for name, value in subject.items() if value is not None}
    application = Application(params=params, options=given, **options)
    with StepBar(console, order.method) as progress:
        result = run_apply(application, progress=progress)
    console.print(result.message, highlight=False, markup=False)
    console.print(result.statement["reading"], highlight=False, markup=False)
    if result.status != "ok":
        raise typer.Exit(1)
