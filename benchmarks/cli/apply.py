"""The command ``apply``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stable_forgetting.benchmarks.apply import convert, forget
from stable_forgetting.benchmarks.cli.command import command
from stable_forgetting.benchmarks.cli.options import (
    Device,
    Overrides,
    Plugins,
    Threads,
    console,
    register_all,
    split_names,
)
from stable_forgetting.benchmarks.cli.progress import StepBar
from stable_forgetting.benchmarks.report.terminal import show
from stable_forgetting.common.base.errors import ConfigError
from stable_forgetting.common.base.hub import check_push
from stable_forgetting.common.methods.base import ALIASES
from stable_forgetting.common.store.weights import CONFIG

OF_CONVERSION = {"convert", "out", "arch", "image_size", "label_names"}
"""Options that --convert reads."""
TRY = "Hardly changed: raise lr or steps (--set lr=..., --set steps=...), or try --method a,b,c."


@dataclass(frozen=True)
class Order:
    """The options of one application."""

    out: Annotated[
        Path, typer.Option(help="New folder: merged model, adapter, statement, card, report.html.")
    ]
    model: Annotated[
        Path | None,
        typer.Option(
            help="Images: folder of timm (model.safetensors + config.json), .safetensors file or "
            "hub id (timm/..., hf-hub:...). Text: folder of a Hugging Face causal LM with its "
            "tokenizer, of a PEFT adapter, or hub id."
        ),
    ] = None
    forget: Annotated[
        Path | None,
        typer.Option(
            help='What to forget: a folder CLASS/x.png, or a .jsonl of {"question", "answer"} or '
            '{"text"} rows.'
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            help="A method (see below, and unlearn show methods), or several: a,b,c tries each and "
            "chooses on retained samples that are held out."
        ),
    ] = None
    retain: Annotated[Path | None, typer.Option(help="Samples to keep, in the same form.")] = None
    test: Annotated[
        Path | None, typer.Option(help="Samples the model never saw, for the statement only.")
    ] = None
    preset: Annotated[str | None, typer.Option(help="Preset of the method.")] = None
    set_: Overrides = None
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0
    arch: Annotated[str | None, typer.Option(help="Images: timm name, for a bare file.")] = None
    image_size: Annotated[
        int | None, typer.Option(help="Images: side in px, if the weights do not tell it.", min=1)
    ] = None
    template: Annotated[
        str | None,
        typer.Option(
            help="Text: chat (the tokenizer's own; default where it has one), question_answer, "
            "llama2_chat or llama3_chat."
        ),
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Text: tokens of the longest row (1024); longer texts are divided.", min=8
        ),
    ] = None
    device: Device = "auto"
    threads: Threads = 1
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Continue although the model is right on too few images of a folder."
        ),
    ] = False
    goal: Annotated[
        float | None,
        typer.Option(
            help="What accuracy (images) or probability (text) on forget data should come to, in "
            "percent. 0 for whole classes and texts.",
            min=0,
            max=100,
        ),
    ] = None
    attacks: Annotated[
        str | None, typer.Option(help="relearn: steps until fine-tuning brings the forgotten back.")
    ] = None
    push: Annotated[
        str | None,
        typer.Option(
            help="Also upload the folder to the hub as OWNER/NAME; a new repository is private."
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit code 3 where the model has hardly changed, or that cannot be told.",
        ),
    ] = False
    convert: Annotated[
        Path | None,
        typer.Option(
            help="Only make a folder for --model from a .pth, .pt, .bin or .safetensors file. "
            "Weights alone are read, and no code runs."
        ),
    ] = None
    label_names: Annotated[
        str | None, typer.Option(help="Of --convert: names of the classes, comma-separated, by id.")
    ] = None


@command(
    "unlearn apply --model my_vit/ --forget forget/ --retain retain/ --method gd_lora --out "
    "forgotten/",
    "unlearn apply --model vit.safetensors --arch vit_tiny_patch16_224 --forget "
    "forget/ --method ascent --out out/ --set lr=1e-5",
    "unlearn apply --model my_llm/ --forget forget.jsonl --retain retain.jsonl --test unseen.jsonl "
    "--method ihl --out forgotten/ --set batch_size=8",
    "unlearn apply --model meta-llama/Llama-3.1-8B-Instruct --template llama3_chat --forget "
    "forget.jsonl --retain retain.jsonl --method npo_gdr --out forgotten/",
    "unlearn apply --model my_vit/ --forget forget/ --retain retain/ --test test/ --method "
    "gd,gd_ul,scrub --attacks relearn --out forgotten/",
    "unlearn apply --convert my_vit.pth --arch vit_tiny_patch16_224 --out my_vit/",
    "unlearn apply --convert hf/pytorch_model.bin --out hf_safe/",
)
def apply(order: Order, plugin: Plugins = None) -> None:
    """Make your own model forget your own images (timm) or texts (Hugging Face causal LM).

    Which method? In our small tests these came nearest to a retrained model: a class of images:
    gd_lora, gd_ball, gd_ul. Some images: finetune, gd_sine, gd_lora. Passages: gd, ihl, gd_lora.
    Answers: gd_ball, npo_gdr, simnpo. Give several, separated by commas. One is chosen, by its
    distance to the goal on forget data and to the given model on retained samples kept out of
    training. docs/use.md has the numbers.

    Pickled weights: --convert makes a folder of them, which --model takes.
    """
    if order.convert is not None:
        _convert(order, order.convert)
        return
    missing = [name for name in ("model", "forget", "method") if not getattr(order, name)]
    if missing:
        listed = ", ".join(f"--{name}" for name in missing)
        raise ConfigError(f"apply: give {listed}; or --convert FILE")
    if order.label_names:
        raise ConfigError(
            f"apply: --label-names is of --convert; a folder has them in its {CONFIG}"
        )
    register_all(plugin)
    _apply(order)


def _convert(order: Order, file: Path) -> None:
    unused = [name for name in vars(order) if name not in OF_CONVERSION]
    given = [
        name for name in unused if (getattr(order, name) or None) != (getattr(Order, name) or None)
    ]
    if given:
        listed = ", ".join(f"--{name.strip('_').replace('_', '-')}" for name in given)
        raise ConfigError(f"apply: --convert only makes a folder; leave {listed} out")
    names = tuple(split_names(order.label_names, "--label-names"))
    options = {key: getattr(order, key) for key in ("arch", "image_size")}
    for line in convert(file, order.out, label_names=names, **options):
        console.print(line, markup=False, soft_wrap=True)


def _apply(order: Order) -> None:
    options = dict(vars(order))
    strict, push = options.pop("strict"), options.pop("push")
    if push:
        check_push(push)
    del options["convert"], options["label_names"]
    method = str(order.method)
    options["method"] = [ALIASES.get(name, name) for name in split_names(method, "--method")]
    options["audits"] = tuple(split_names(options.pop("attacks"), "--attacks"))
    with StepBar(console, method) as progress:
        result = forget(params=options.pop("set_") or (), progress=progress, **options)
    if result.status != "ok":
        console.print(result.message, markup=False)
        console.print(result.statement["reading"], markup=False)
        raise typer.Exit(1)
    show(console, result.page)
    console.print(result.message, markup=False)
    if push:
        console.print(f"uploaded: {result.push(push)}", markup=False)
    word = result.statement["verdict"]["word"]
    if word == "hardly changed":
        console.print(TRY, markup=False)
    if strict and word in ("hardly changed", "cannot tell"):
        raise typer.Exit(3)
