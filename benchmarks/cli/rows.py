"""The commands that work: ``run``, ``stage``, ``apply`` and ``demo``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.options import (
    STORE,
    DataRoot,
    Device,
    ExecutorName,
    Only,
    Overrides,
    Plugins,
    Seeds,
    Store,
    Threads,
    Workers,
    console,
    make_runtime,
    register_all,
    resolve_suite,
    resolve_suites,
)
from common.base import processes
from common.base.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.leaderboard.board import Leaderboard
    from benchmarks.spec.resolve import ResolvedSuite
    from common.protocol.benchmark import Runtime

app = typer.Typer()


@app.command(
    epilog="Examples:  unlearn run digits-class  ·  unlearn run cifar100-class10-small "
    "--data-root data  ·  unlearn run digits-all  ·  unlearn run digits-class --only "
    "gd_sine,gd_lora_omega --seeds 7,8,9 --set defaults.steps=200"
)
def run(
    suite: Annotated[str, typer.Argument(help="Suite name, group of suites, or YAML file.")],
    store: Store = STORE,
    data_root: DataRoot = None,
    set_: Overrides = None,
    seeds: Seeds = None,
    only: Only = None,
    device: Device = "auto",
    threads: Threads = 1,
    workers: Workers = 0,
    executor: ExecutorName = "auto",
    plugin: Plugins = None,
) -> None:
    """Run a suite (what is in the store is not run again) and print its leaderboard."""
    register_all(plugin)
    from benchmarks.cli.session import finish

    resolved = resolve_suites(suite, set_, seeds, only)
    runtime = make_runtime(store, data_root, device, threads, plugin)
    finish(_run_all(resolved, runtime, workers, executor))


def _run_all(
    suites: Sequence[ResolvedSuite], runtime: Runtime, workers: int, executor: str
) -> dict[str, str]:
    """Runs suites one after the other, then prints all boards; returns what failed."""
    from benchmarks.leaderboard.report import print_board, print_places

    boards = []
    failed: dict[str, str] = {}
    for suite in suites:
        board, lost = _run(suite, runtime, workers, executor)
        boards.append(board)
        failed |= lost
    for board in boards:
        print_board(console, board)
    for suite in suites:
        print_places(console, suite, runtime)
    return failed


def _run(
    suite: ResolvedSuite, runtime: Runtime, workers: int, executor: str
) -> tuple[Leaderboard, dict[str, str]]:
    from benchmarks.cli.session import run_with_audits
    from benchmarks.leaderboard.derive import make_leaderboard
    from benchmarks.leaderboard.write import write_report
    from common.store.stages import StageStore

    executed, failed = run_with_audits(suite, runtime, workers, executor)
    board = make_leaderboard(suite, StageStore(runtime.store))
    shown = (runtime.store / "tensorboard" / suite.name).is_dir()
    if processes.is_main():
        write_report(board, runtime.store, boards=executed > 0 or not shown)
    return board, failed


@app.command(
    epilog="Examples:  unlearn plan digits-class --keys, then: unlearn stage digits-class "
    "KEY  ·  accelerate launch --multi_gpu -m benchmarks stage lethevit-cifar10 KEY"
)
def stage(
    suite: Annotated[str, typer.Argument(help="Suite name or YAML file.")],
    key: Annotated[str, typer.Argument(help="Start of the stage's key (see plan --keys).")],
    store: Store = STORE,
    data_root: DataRoot = None,
    set_: Overrides = None,
    seeds: Seeds = None,
    only: Only = None,
    device: Device = "auto",
    threads: Threads = 1,
    plugin: Plugins = None,
) -> None:
    """Run one stage in this process (and nothing else): for launchers and big models."""
    register_all(plugin)
    from benchmarks.pipeline.executors import prepare_worker
    from benchmarks.pipeline.planner import make_plan
    from benchmarks.pipeline.progress import StepBar
    from benchmarks.pipeline.runner import run_stage
    from benchmarks.pipeline.schedule import events_folder
    from common.store.stages import StageStore

    resolved = resolve_suite(suite, set_, seeds, only)
    runtime = make_runtime(store, data_root, device, threads, plugin)
    stages = list(make_plan(resolved, StageStore(runtime.store)).stages())
    hits = [s for s in stages if s.key.startswith(key)]
    if len(hits) != 1:
        raise ConfigError(
            f"key '{key}' fits {len(hits)} stages of {resolved.name}; see: unlearn "
            f"plan {suite} --keys"
        )
    StageStore(runtime.store).sweep()
    prepare_worker(threads, runtime.plugins, orphan_guard=False)
    with StepBar(console, hits[0].name) as progress:
        status = run_stage(
            hits[0],
            runtime,
            events=events_folder(runtime, resolved.name, hits[0]),
            progress=progress,
        )
    console.print(f"{hits[0].name}: {status}", highlight=False)


@app.command(
    epilog="Examples:  unlearn apply --model my_vit/ --forget forget/ --retain retain/ --method "
    "gd_sine --out forgotten/  ·  unlearn apply --model vit.safetensors --arch "
    "vit_small_patch16_224 --num-classes 10 --forget forget/ --method ascent --out out/ "
    "--set lr=1e-5  ·  unlearn apply --model my_llm/ --forget forget.jsonl --retain retain.jsonl "
    "--test unseen.jsonl --method gd_sine --out forgotten/ --set batch_size=8  ·  unlearn apply "
    "--model meta-llama/Llama-3.1-8B-Instruct --template llama3_chat --forget forget.jsonl "
    "--retain retain.jsonl --method npo_gdr --out forgotten/"
)
def apply(
    model: Annotated[
        Path,
        typer.Option(
            help="Images: folder (model.safetensors + config.json) or .safetensors file. Text: "
            "folder of a Hugging Face causal LM with its tokenizer, or hub id."
        ),
    ],
    forget: Annotated[
        Path,
        typer.Option(
            help='What to forget: a folder CLASS/x.png, or a .jsonl of {"question", "answer"} or '
            '{"text"} rows.'
        ),
    ],
    method: Annotated[str, typer.Option(help="A method (see: unlearn ls methods).")],
    out: Annotated[Path, typer.Option(help="New folder: merged model, adapter, statement.json.")],
    retain: Annotated[Path | None, typer.Option(help="What to keep, in the same form.")] = None,
    test: Annotated[
        Path | None, typer.Option(help="Unseen samples in the same form, for the statement only.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Preset of the method.")] = None,
    set_: Overrides = None,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    arch: Annotated[str | None, typer.Option(help="Images: timm name, for a bare file.")] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Images: classes, for a bare file.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help="Text: question_answer (default), llama2_chat or llama3_chat."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Text: tokens of the longest row (1024).", min=8)
    ] = None,
    device: Device = "auto",
    threads: Threads = 1,
    plugin: Plugins = None,
) -> None:
    """Make your own model forget your own images (timm) or texts (Hugging Face causal LM)."""
    register_all(plugin)
    from benchmarks.apply import Application
    from benchmarks.apply import apply as run_apply
    from benchmarks.pipeline.progress import StepBar

    options = {
        "arch": arch,
        "num_classes": num_classes,
        "template": template,
        "max_length": max_length,
    }
    application = Application(
        model=model,
        forget=forget,
        method=method,
        out=out,
        retain=retain,
        test=test,
        preset=preset,
        params=tuple(set_ or ()),
        seed=seed,
        options={name: value for name, value in options.items() if value is not None},
        device=device,
        threads=threads,
    )
    with StepBar(console, method) as progress:
        result = run_apply(application, progress=progress)
    console.print(result.message, highlight=False, markup=False)
    console.print(result.statement["reading"], highlight=False, markup=False)
    if result.status != "ok":
        raise typer.Exit(1)


@app.command(epilog="Examples:  unlearn demo  ·  unlearn demo --quick")
def demo(
    store: Store = STORE,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, fewer rows, a shorter training.")
    ] = False,
    workers: Workers = 0,
    threads: Threads = 1,
) -> None:
    """Real digits and invented authors, class, random and author forgetting: five minutes."""
    register_all(None)
    from benchmarks.cli.session import finish

    started = time.monotonic()
    runtime = make_runtime(store, None, "cpu", threads, None)
    overrides, seeds, only = None, None, None
    if quick:
        overrides = ["protocol.train.epochs=12", "protocol.minimum_train_accuracy=95"]
        seeds, only = "1", "finetune,gd,gd_lora,gd_lora_omega,gd_sine"
    suites = [
        resolve_suite(name, overrides, seeds, only) for name in ("digits-class", "digits-random")
    ]
    suites.append(resolve_suite("authors", None, seeds, only))
    failed = _run_all(suites, runtime, workers, "auto")
    minutes = (time.monotonic() - started) / 60
    console.print(f"\nDone in {minutes:.1f} minutes. What next:", highlight=False)
    for line in (
        "unlearn report digits-class               the tables again, from the records",
        "unlearn show gd_sine                      what a method is, and its defaults",
        "unlearn run lethevit-cifar10-small        real CIFAR-10 on two cores (downloads, "
        "or --data-root)",
        "unlearn run tofu-small                    real TOFU on two cores (the same)",
        "CONTRIBUTING.md                           add a baseline in 20 lines",
    ):
        console.print(f"  {line}", highlight=False)
    finish(failed)
