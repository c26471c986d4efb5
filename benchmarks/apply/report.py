"""What every statement holds and says in plain words, and the pages that are made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from stable_forgetting.benchmarks.report.section import Column, Section, Table, filled, table
from stable_forgetting.common.protocol.given import GivenBenchmark
from stable_forgetting.common.store.records import clean_metrics

if TYPE_CHECKING:
    from torch import nn


def weight_change(
    before: nn.Module, after: nn.Module, adapters: Mapping[str, float] | None
) -> dict[str, Any]:
    """How far the weights moved; ``relative``: ||W - W0|| / ||W0|| over all parameters."""
    moved = base = 0.0
    changed = 0
    original = dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        start = original[name].detach().double()
        difference = parameter.detach().double() - start
        moved += float(difference.square().sum())
        base += float(start.square().sum())
        changed += int(bool(difference.any()))
    return {
        "relative": math.sqrt(moved / base) if base else None,
        "tensors_changed": changed,
        "adapters": None if adapters is None else clean_metrics(adapters),
    }


def reading(statement: Mapping[str, Any], benchmark: GivenBenchmark) -> str:
    """What the numbers do and do not show, in plain words."""
    if statement["status"] == "diverged":
        return "Training diverged: there is no unlearned model, and nothing to compare."
    return " ".join(
        [*benchmark.outcome(statement), *_recovery(statement), *caveats(statement, benchmark)]
    )


def caveats(statement: Mapping[str, Any], benchmark: GivenBenchmark) -> list[str]:
    """What the numbers do not show."""
    unit, yardstick = benchmark.unit, benchmark.yardstick
    lines = [f"A warning was given: {text}." for text in statement["warnings"]]
    lines.append(
        "No model was retrained without the forget set here, so how close this one is to such a "
        f"model is unknown; that closeness, not a low {yardstick}, is the goal of unlearning."
    )
    tried = "probing" if statement["audits"] else "fine-tuning or probing"
    lines.append(
        f"A low {yardstick} on the forget set is not erasure: the information may still be in the "
        f"weights and come back by {tried}, which was not tried; nothing here is a "
        "certificate of deletion."
    )
    if "retain" not in statement["data"]:
        lines.append(
            f"No retain {unit} were given, so what else the model lost was not measured on them."
        )
    if statement["choice"] is not None:
        lines.append(
            f"{statement['choice']['held_out']} retained {unit} were held out to choose the method "
            f"and were not trained on; the given model had seen them, so they are not test data."
        )
    return lines


def _recovery(statement: Mapping[str, Any]) -> list[str]:
    """What fine-tuning brought back."""
    relearn = statement["audits"].get("relearn")
    if relearn is None:
        return []
    steps, most = relearn["value"], relearn["max_steps"]
    share = f"{100 * relearn['share']:.0f} % of the given model's accuracy on the forget set"
    with_ = f"steps of AdamW (lr {relearn['lr']:g}, batches of {relearn['batch_size']})"
    if steps >= most:
        return [f"Fine-tuning on the forget set did not bring back {share} in {most} {with_}."]
    if steps == 0:
        return [f"The model still has {share}: there is nothing to bring back."]
    return [
        f"Fine-tuning on the forget set brought back {share} in {steps:.0f} {with_}; how many a "
        "model needs that never saw these samples is not known here."
    ]


# One page, as a card and as HTML -----------------------------------------------------------------


def front_matter(statement: Mapping[str, Any], benchmark: GivenBenchmark, name: str) -> str:
    """What the hub reads of a card: the numbers of the new model as a ``model-index``."""
    fields: dict[str, Any] = dict(benchmark.card)
    fields["tags"] = ["machine-unlearning", statement["method"]["name"]]
    if statement["input"].get("revision"):
        fields["base_model"] = statement["input"]["model"]
    fields["model-index"] = [{"name": name, "results": _results(statement, benchmark)}]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n\n"


def _results(statement: Mapping[str, Any], benchmark: GivenBenchmark) -> list[dict[str, Any]]:
    """The form of the hub: a task, a data set and its metrics for each part of the data."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for part, key, title, value in _numbers(statement["after"], benchmark):
        parts.setdefault(part, []).append({"type": key, "name": title, "value": round(value, 4)})
    return [
        {
            "task": {"type": benchmark.card["pipeline_tag"]},
            "dataset": {"type": "private", "name": f"{part} data of the request"},
            "metrics": metrics,
        }
        for part, metrics in parts.items()
    ]


def _numbers(
    measured: Mapping[str, Any], benchmark: GivenBenchmark
) -> Iterator[tuple[str, str, str, float]]:
    """(part in words, measure, its title, value) of all that is known."""
    titles = {m.name: f"{m.title}, {m.unit}".removesuffix(", ") for m in benchmark.metrics}
    for part, values in measured.items():
        whole = not isinstance(values, Mapping)
        for key, value in [(part, values)] if whole else values.items():
            if key in titles and value is not None:
                name = "forget and test" if whole else part.replace("_", " ")
                yield name, key, titles[key], value


def sections(statement: Mapping[str, Any], benchmark: GivenBenchmark, name: str) -> list[Section]:
    """The report of a deletion: what was measured first, what it does not show last."""
    method, made = statement["method"], statement["input"]
    intro = (
        f"Model: {made['model']} ({made['architecture']}). To forget: "
        f"{_count(statement['data']['forget'], benchmark)}. Method: {method['name']}, on "
        f"{statement['created']}."
    )
    words = " ".join([*benchmark.outcome(statement), *_recovery(statement)])
    return filled(
        Section(f"Deletion report: {name}", (statement["verdict"]["line"], intro), depth=1),
        Section("Before and after", (), before_and_after(statement, benchmark)),
        *_choice(statement["choice"], benchmark),
        Section("What was measured", (words,)),
        Section(
            "What it does not show", lines=tuple(caveats(statement, benchmark)), tone="warning"
        ),
        _request(statement, benchmark),
        _weights(statement),
        *_earlier(statement["earlier"]),
        _settings(statement),
    )


def before_and_after(statement: Mapping[str, Any], benchmark: GivenBenchmark) -> Table:
    """One row per measured number."""
    now = {known[:2]: known[3] for known in _numbers(statement["after"], benchmark)}
    rows = [
        (part, title, f"{was:.2f}", f"{now[part, key]:.2f}")
        for part, key, title, was in _numbers(statement["before"], benchmark)
    ]
    heads: list[str | Column] = [Column("data", "label"), Column("measured", "words")]
    return table([*heads, "before", "after"], rows)


def _choice(choice: Mapping[str, Any] | None, benchmark: GivenBenchmark) -> list[Section]:
    if choice is None:
        return []
    key = benchmark.yardstick
    rows = [
        (
            trial["method"],
            *("–" if v is None else f"{v:.2f}" for v in (trial["forget"], trial["validation"])),
            "diverged" if trial["distance"] is None else f"{trial['distance']:.2f}",
            f"{trial['seconds']:.0f}",
        )
        for trial in choice["trials"]
    ]
    rows.append(("(wanted)", f"{choice['goal']:.2f}", f"{choice['given']:.2f}", "", ""))
    heads = ["method", f"forget {key}, %", f"validation {key}, %", "distance", "time, s"]
    text = (
        f"{choice['chosen']} was chosen by the {choice['rule']}; test data were not looked at.",
    )
    shown = table(heads, rows, marks={choice["chosen"]: "goal", "(wanted)": "reference"})
    return [Section("Choice of the method", text, shown)]


def _count(about: Mapping[str, Any], benchmark: GivenBenchmark) -> str:
    return f"{about[benchmark.unit]} {benchmark.unit}"


def _request(statement: Mapping[str, Any], benchmark: GivenBenchmark) -> Section:
    rows = [
        (
            role,
            str(about.get("folder") or about.get("file") or "in memory"),
            _count(about, benchmark),
            _digest(about),
        )
        for role, about in statement["data"].items()
    ]
    shown = table(["part", "name", "samples", "SHA-256"], rows, words=True)
    return Section("The request", (f"Scenario: {statement['scenario']}.",), shown, level="full")


def _digest(about: Mapping[str, Any]) -> str:
    return str(about.get("digest") or about["sha256"])


def _weights(statement: Mapping[str, Any]) -> Section:
    rows = []
    for when in [when for when in ("input", "output") if when in statement]:
        digests = statement[when]["weights_sha256"]
        named = digests.items() if isinstance(digests, Mapping) else [("all tensors", digests)]
        rows += [(when, file, digest) for file, digest in named]
    relative = statement["weight_change"]["relative"]
    moved = () if relative is None else (f"The weights moved by {relative:.2e} of their norm.",)
    text = (*moved, *_of_peft(statement.get("output", {})))
    shown = table(["model", "file", "SHA-256"], rows, words=True)
    return Section("Weights", text, shown, level="full")


def _of_peft(output: Mapping[str, Any]) -> tuple[str, ...]:
    """Whether PEFT reads the adapter, where there is one."""
    if "peft" not in output:
        return ()
    if output["peft"]:
        return (f"PEFT does not read the adapter ({output['peft']}): load the merged model.",)
    loads = "PEFT reads the adapter: PeftModel.from_pretrained(MODEL, FOLDER + '/adapter')."
    if "peft_error" not in output:
        return (loads,)
    return (
        f"{loads} It is a LoRA of rank {output['peft_rank']}, whose update differs from the "
        f"bounded one by {100 * output['peft_error']:.2g} % of its norm.",
    )


def _earlier(requests: Sequence[Mapping[str, Any]]) -> list[Section]:
    if not requests:
        return []
    rows = [
        (str(place), r["created"], r["method"], _digest(r["data"]["forget"]), r["statement_sha256"])
        for place, r in enumerate(requests, 1)
    ]
    heads = ["request", "time", "method", "forget set", "statement"]
    text = ("The given model was itself made by earlier requests, the first one first.",)
    return [Section("Earlier requests", text, table(heads, rows, words=True), level="full")]


def _settings(statement: Mapping[str, Any]) -> Section:
    method, machine = statement["method"], statement["environment"]
    cost = statement["cost"]
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    lines = (
        f"Method: {method['name']}, version {method['version']}, seed {statement['seed']}; "
        f"{method['paper']}.",
        f"Settings: {json.dumps(method['params'])}.",
        f"Cost: {cost['steps']:.0f} steps, {cost['seconds']:.1f} s on {statement['device']}.",
        f"Python {machine['python']}; {packages}.",
    )
    return Section("How it was made", lines=lines, level="full")


HARDLY, MOSTLY = 0.2, 0.8
"""Shares of the way from the given model to the goal: below the first the model has hardly changed,
from the second on it has forgotten."""
DAMAGE = 5.0
"""Points by which what is retained may fall."""
LEAST = 1.0
"""Points that the given model must be above the goal, or what it forgot cannot be told."""


def verdict(
    before: Mapping[str, Any], after: Mapping[str, Any], key: str, goal: float | None
) -> dict[str, str]:
    """The ``word`` and the whole ``line``.

    The words are ``cannot tell``, ``hardly changed``, ``partly forgotten``, ``forgotten``.

    Args:
        before: What was measured of the given model: part -> measure -> percent.
        after: Of the new one.
        key: The measure that is read as "it has forgotten".
        goal: What it should come to on forget data, in percent; None where nobody has said it.
    """
    was, now = before["forget"][key], after["forget"][key]
    aim = "unknown; give it, or unseen samples as test" if goal is None else f"{goal:.4g} %"
    way = 0.0 if goal is None else was - goal
    if way < LEAST:
        word = "cannot tell"
    elif was - now < HARDLY * way:
        word = "hardly changed"
    else:
        word = "forgotten" if was - now >= MOSTLY * way else "partly forgotten"
    kept, numbers = _kept(before, after, key)
    line = (
        f"{word.capitalize()}{', ' if kept else ''}{kept}: {key} on forget data "
        f"{was:.1f} -> {now:.1f} % (goal {aim}){numbers}. Forgotten means {100 * MOSTLY:g} % "
        f"of the way to the goal, hardly changed less than {100 * HARDLY:g} %. Nobody can tell "
        f"where the given model was less than {LEAST:g} point above the goal. Retained data is "
        f"damaged if it loses more than {DAMAGE:g} points."
    )
    return {"word": word, "line": line}


def _kept(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> tuple[str, str]:
    """What became of retained data, and its numbers; empty where there is none."""
    if "retain" not in before:
        return "", ""
    was, now = before["retain"][key], after["retain"][key]
    word = "retained damaged" if was - now > DAMAGE else "retained kept"
    return word, f", on retained data {was:.1f} -> {now:.1f} %"
