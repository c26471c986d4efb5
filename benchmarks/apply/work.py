"""One application: everything is checked before a model is read, then it is carried out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.apply.place import check_out
from stable_forgetting.benchmarks.apply.result import Result
from stable_forgetting.common.base import processes
from stable_forgetting.common.base.config import Strict, apply_overrides
from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.base.registry import METHODS
from stable_forgetting.common.base.seeding import make_deterministic
from stable_forgetting.common.methods.base import check_read, resolve_config
from stable_forgetting.common.protocol.benchmark import Runtime, check_device, pick_device
from stable_forgetting.common.protocol.given import Application, GivenBenchmark

if TYPE_CHECKING:
    from stable_forgetting.common.train.protocols import Progress

AUDITS = ("relearn",)
IN_MEMORY = (
    "its samples are neither images nor texts; give pairs (image, label), mappings with image and "
    "label, texts, or mappings with question and answer"
)


def check_application(application: Application, configs: Mapping[str, Strict]) -> None:
    """Refuses output, methods and audits with which nothing can be done."""
    if application.out is not None:
        check_out(application.out)
    for name, config in configs.items():
        _check_access(name, config, application)
    for audit in application.audits:
        if audit not in AUDITS:
            raise ConfigError(f"attacks: '{audit}' is not known; choose {', '.join(AUDITS)}")
    if len(application.methods) > 1 and application.retain is None:
        raise ConfigError(
            "several methods are chosen among on a part of the retained samples; give --retain "
            "(retain=), or one method"
        )


def check_model(model: Any) -> None:
    """Refuses a model in memory whose weights are packed; a path is looked at where it is read."""
    from stable_forgetting.common.bounded.quantised import is_quantised

    if not hasattr(model, "modules"):
        return
    marks = [getattr(model, name, None) for name in ("is_quantized", "quantization_method")]
    marks.append(getattr(getattr(model, "config", None), "quantization_config", None))
    if any(marks) or any(map(is_quantised, model.modules())):
        raise CheckpointError("the given model is quantised; give the model with its full weights")


def _check_access(name: str, config: Strict, application: Application) -> None:
    info, access = METHODS[name].info, METHODS[name].access_of(config)
    if not info.changes_model:
        raise ConfigError(f"method '{name}' changes nothing; choose one that unlearns")
    if info.models > 1:
        raise ConfigError(
            f"method '{name}' answers with {info.models} models at inference, so there is no one "
            "checkpoint to write; choose a method that changes one, such as task_vector"
        )
    if "initial" in access:
        raise ConfigError(
            f"method '{name}' trains from the start, which needs the original recipe; choose one "
            "that changes a given model"
        )
    if "retain" in access and application.retain is None:
        raise ConfigError(f"method '{name}' reads retain data; give --retain (retain=)")


def check_applicable(application: Application, benchmark: GivenBenchmark) -> None:
    """Refuses methods that are not for what is asked of them."""
    scenario = benchmark.scenario
    for method in application.methods:
        info = METHODS[method].info
        reason = info.inapplicable(scenario=scenario, modality=benchmark.modality)
        if reason is not None:
            fits = info.modality in ("", benchmark.modality)
            asked = f"; these {benchmark.unit} ask for {scenario} forgetting" if fits else ""
            raise ConfigError(f"method '{method}' is {reason}{asked}; choose another")
    if len(application.methods) > 1 and application.goal is None and scenario == "random":
        raise ConfigError(
            "goal: some images of retained classes are to be forgotten, and a model that never saw "
            "them would still be right on most; to choose among several methods, give its accuracy "
            "on unseen images as --goal, such as --goal 85 (goal=85)"
        )


def benchmark_of(application: Application) -> GivenBenchmark:
    """The benchmark that takes what is to be forgotten, and all of the options."""
    from stable_forgetting.language.apply.benchmark import GivenTexts  # imports torch
    from stable_forgetting.vision.apply.benchmark import GivenImages

    kinds: list[type[GivenBenchmark]] = [GivenTexts, GivenImages]
    chosen = next((kind for kind in kinds if kind.takes(application.forget)), None)
    if chosen is None:
        forms = " or ".join(kind.form for kind in kinds)
        if not isinstance(application.forget, Path):
            raise ConfigError(f"forget: {IN_MEMORY}")
        raise ConfigError(f"forget: {application.forget}: give {forms}")
    for option in application.options:
        if option not in chosen.options:
            kind = next((kind.kind for kind in kinds if option in kind.options), "nothing")
            raise ConfigError(
                f"{option} is for {kind}, and forget holds {chosen.kind}; leave it out"
            )
    return chosen(application, Runtime(device=application.device))


def apply(application: Application, *, progress: Progress | None = None) -> Result:
    """Unlearns ``forget``; writes model, adapter, statement and report into ``out``, or nothing.

    Memory: the given model and the one that is changed are held together; where several methods are
    tried, the best one so far, too.  ``progress`` is called after every step of a training.

    Raises:
        UserError: Something in the application can be mended; nothing was written.
    """
    params, preset = application.params, application.preset
    params = params if isinstance(params, Mapping) else apply_overrides({}, params)
    names = application.methods
    configs = {name: resolve_config(name, preset, params, origin=name) for name in names}
    for name in names:
        check_read(name, params, origin=name)
    check_application(application, configs)
    check_model(application.model)
    benchmark = benchmark_of(application)
    check_applicable(application, benchmark)
    chosen = pick_device(application.device)
    check_device(chosen)
    import torch

    from stable_forgetting.benchmarks.apply.attempt import Run

    device = torch.device(chosen)
    make_deterministic(application.threads)
    if processes.count() > 1:
        from stable_forgetting.common.train.launch import join_processes

        join_processes(device)
        processes.wait_for_all()  # until then nobody writes what others refuse to overwrite
    benchmark.prepare(device, [*configs.values()])
    benchmark.split(application.seed)
    return Run(benchmark, configs, device, progress).run()
