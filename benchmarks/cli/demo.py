"""The command ``demo``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from benchmarks.cli.command import command
from benchmarks.cli.options import STORE, Machine, Pool, Selection, Store, Threads, Workers, console

NEXT = (
    "unlearn report digits-class               the tables again, from the records",
    "unlearn show gd_sine                      what a method is, and its defaults",
    "unlearn run lethevit-cifar10-small        real CIFAR-10 on two cores (downloads, "
    "or --data-root)",
    "unlearn run tofu-small                    real TOFU on two cores (the same)",
    "CONTRIBUTING.md                           add a baseline in 20 lines",
)


@command("unlearn demo", "unlearn demo --quick")
def demo(
    store: Store = STORE,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, fewer rows, a shorter training.")
    ] = False,
    workers: Workers = 0,
    threads: Threads = 1,
) -> None:
    """Real digits and invented authors, class, random and author forgetting: five minutes."""
    from benchmarks.cli.run import run_all
    from benchmarks.cli.session import finish

    started = time.monotonic()
    runtime = Machine(store, device="cpu", threads=threads).runtime()
    digits = authors = Selection()
    if quick:
        rows = "finetune,gd,gd_lora,gd_lora_omega,gd_sine"
        epochs = ["protocol.train.epochs=12", "protocol.minimum_train_accuracy=95"]
        digits, authors = Selection(epochs, "1", rows), Selection(None, "1", rows)
    suites = [digits.suite("digits-class"), digits.suite("digits-random"), authors.suite("authors")]
    failed = run_all(suites, runtime, Pool(workers))
    minutes = (time.monotonic() - started) / 60
    console.print(f"\nDone in {minutes:.1f} minutes. What next:", highlight=False)
    for line in NEXT:
        console.print(f"  {line}", highlight=False)
    finish(failed)
