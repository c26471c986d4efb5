"""The one training loop, and the one importer of accelerate.

:func:`fit` trains whatever requires gradients, on whatever an objective makes of named batches.
Training Original, Retrain and every gradient-based unlearning method go through it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from common.adapters import BoundedLinear, adapted_layers, adapter_statistics
from common.config import did_you_mean
from common.errors import ConfigError, Diverged
from common.loading import Batch, Loader
from common.objectives import Objective, Terms
from common.quantised import dense_weight
from common.reuse import reuse_weights
from common.schemas import FitConfig
from common.sharding import Sharded, whole_tensor
from common.training_state import TrainingState

ModelForward = Callable[[nn.Module, Batch], Tensor]
AfterStep = Callable[[nn.Module], Mapping[str, float] | None]
Watch = Callable[[nn.Module, int], Mapping[str, float | None]]
"""(model in eval mode, steps done) -> metrics."""


FOREIGN = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}
"""Launchers that bring a loop of their own."""


class ScalarSink(Protocol):
    """Where scalars go; see :class:`common.tracking.Tracker`."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records named values at a step."""


class Stateful(Protocol):
    """Something whose tensors belong into a checkpoint."""

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a state."""


@dataclass
class FitResult:
    """What a finished run cost and how it ended."""

    steps: int
    seconds: float
    last: dict[str, float] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)


def total_steps(config: FitConfig, loaders: Mapping[str, Loader]) -> int:
    """Optimizer steps of a run; epochs count passes over the first loader."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    first = next(iter(loaders.values()))
    return math.ceil(config.epochs * first.batches_per_epoch / config.accumulation)


def warmup_steps(config: FitConfig, loaders: Mapping[str, Loader]) -> int:
    """Optimizer steps of the warm-up; epochs count passes over the first loader, rounded up."""
    if config.warmup_epochs is None:
        return config.warmup_steps
    first = next(iter(loaders.values()))
    return math.ceil(config.warmup_epochs * first.batches_per_epoch / config.accumulation)


def learning_rate(config: FitConfig, step: int, total: int, warmup: int | None = None) -> float:
    """Rate of optimizer step ``step`` (from 0): linear warm-up, then the schedule.

    Args:
        config: Rate and schedule.
        step: Optimizer step.
        total: Optimizer steps in all; ``linear`` and ``cosine`` are 0 there.
        warmup: Steps of the warm-up (:func:`warmup_steps`); ``config.warmup_steps`` when absent.
    """
    warmup = config.warmup_steps if warmup is None else warmup
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def fit(
    model: nn.Module,
    objective: Objective,
    loaders: Mapping[str, Loader],
    config: FitConfig,
    *,
    forward: ModelForward,
    seed: int,
    tracker: ScalarSink | None = None,
    after_step: Sequence[AfterStep] = (),
    penalty: Callable[[nn.Module], Tensor] | None = None,
    checkpoint: Path | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    component_of: Callable[[str], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    watch: Watch | None = None,
) -> FitResult:
    """Trains ``model`` in place.

    Args:
        model: Its parameters that require gradients are trained.
        objective: Makes a loss of named batches.
        loaders: One stream per part that the objective reads.
        config: Length, optimizer, precision.
        forward: (model, batch) -> logits.
        seed: Seeds torch's global stream (dropout) for the duration of the run only.
        tracker: Receives losses, norms and adapter statistics.
        after_step: Called with the model after each optimizer step (projections); may return
            scalars to log.
        penalty: Added to the objective, a function of the model's parameters.
        checkpoint: File for mid-run checkpoints; an existing one is resumed.
        stateful: Further states to keep in checkpoints, by name.
        component_of: Parameter name -> component, for norms.
        progress: Called with (steps done, steps in all).
        watch: Evaluates the model every ``config.evaluate_every`` steps and at the last one; what
            it returns is logged as ``evaluation/<metric>``.

    Raises:
        Diverged: A loss became non-finite or larger than ``config.loss_cap``, or a parameter
            ended non-finite.
        CheckpointError: The checkpoint is damaged or of another run.

    Logged at step 1, every ``config.log_every`` steps and at the last: ``loss/<part>``, ``lr``,
    ``grad_norm/<c>`` (before clipping) and ``weight_norm/<c>`` of what is trained, per component
    (``A`` and ``B`` for factors); ``logits/mean``, ``logits/spread``; ``adapter/*`` (see
    :func:`common.adapters.adapter_statistics`); at probes also ``probe_grad_norm/<c>`` and
    ``effective_weight_norm/<c>``.
    """
    started = time.perf_counter()
    run = _Run(
        model, objective, loaders, config, forward, penalty, component_of, stateful or {}, seed
    )
    model.train()
    with _seeded(seed, run.accelerator.device), contextlib.closing(run), run.splitting():
        first = run.resume(checkpoint)
        for step in range(first, run.total):
            scalars = run.step(step)
            if after_step:
                with run.whole():
                    for hook in after_step:
                        scalars.update(hook(model) or {})
            saves = checkpoint is not None and run.saves(step)
            run.guard(step, sync=saves)
            if run.logs(step):
                scalars.update(run.measure(step))
                run.note(scalars)
                if tracker is not None and run.accelerator.is_main_process:
                    tracker.scalars(step + 1, scalars)
            if checkpoint is not None and saves:
                run.save(checkpoint, step + 1)
            if progress:
                progress(step + 1, run.total)
            if watch is not None and run.evaluates(step):
                metrics = run.evaluate(watch, step, tracker)
                if config.stop_below and below(metrics, config.stop_below):
                    run.total = step + 1
                    break
        run.guard(run.total - 1, final=True)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return FitResult(run.total, time.perf_counter() - started, run.last, run.peak)


def below(metrics: Mapping[str, float | None], limits: Mapping[str, float]) -> bool:
    """Whether every named metric is known and below its limit.

    Raises:
        ConfigError: A name is none of the metrics.
    """
    for name in limits:
        if name not in metrics:
            raise ConfigError(
                f"stop_below: '{name}' is not measured{did_you_mean(name, [*metrics])}"
            )
    values = [metrics[name] for name in limits]
    return all(v is not None and v < limits[n] for n, v in zip(limits, values, strict=True))


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def join_processes(device: torch.device) -> None:
    """Joins the processes of a launcher as training does, for whoever must agree before it."""
    PartialState(cpu=device.type == "cpu")


def make_accelerator(config: FitConfig, device: torch.device) -> Accelerator:
    """An accelerator for this run; accelerate keeps one per process, so an old one is dropped.

    Its device goes too, unless processes are joined: the last run may have been elsewhere.

    Raises:
        ConfigError: The launcher brings a loop of its own (DeepSpeed, Megatron).
    """
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    AcceleratorState._reset_state(reset_partial_state=not joined)
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.accumulation,
        cpu=device.type == "cpu",
    )
    if accelerator.distributed_type in FOREIGN:
        raise ConfigError(
            f"accelerate is set to {accelerator.distributed_type.value}, which is not supported;"
            " launch plain data parallel or FSDP version 2"
        )
    return accelerator


def make_sharded(model: nn.Module, config: FitConfig) -> Sharded | None:
    """Splits the model where the launcher says FSDP; None where it does not.

    accelerate's own preparation would change the caller's model for good, and does not split on a
    CPU; its settings are read all the same: the classes to wrap, resharding after the forward.

    Raises:
        ConfigError: A setting that is not supported.
    """
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not joined or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError("FSDP version 1 is not supported: launch with --fsdp_version 2")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    names = plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or ()
    present = {type(module).__name__ for module in model.modules()}
    if missing := sorted(set(plugin.transformer_cls_names_to_wrap or ()) - present):
        raise ConfigError(f"FSDP: no layer of class '{missing[0]}' to wrap in this model")
    for wanted, mend in (
        (
            isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "CPU offload is not supported: --fsdp_offload_params false",
        ),
        (plugin.activation_checkpointing, "switch on the model's own gradient checkpointing"),
        (plugin.min_num_params, "wrap by class: --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
        (getattr(model, "hf_device_map", None), "leave device_map out of the protocol"),
        (
            config.mixed_precision == "fp16",
            "the loss scale of fp16 is not supported: mixed_precision: bf16",
        ),
        (config.probe_every, "probes need whole gradients: probe_every: 0"),
    ):
        if wanted:
            raise ConfigError(f"FSDP: {mend}")
    return Sharded(model, set(names), reshard=bool(plugin.reshard_after_forward))


class _Run:
    """State of one call of :func:`fit`."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        loaders: Mapping[str, Loader],
        config: FitConfig,
        forward: ModelForward,
        penalty: Callable[[nn.Module], Tensor] | None,
        component_of: Callable[[str], str] | None,
        stateful: Mapping[str, Stateful],
        seed: int,
    ):
        self.seed = seed
        self.config, self.model, self.objective = config, model, objective
        self.loaders = dict(loaders)
        self.penalty = penalty
        self.stateful: dict[str, Stateful] = {**self.loaders, **stateful}
        self.component_of = component_of or (lambda name: "all")
        self.total = total_steps(config, loaders)
        self.warmup = warmup_steps(config, loaders)
        self.accelerator = make_accelerator(config, next(model.parameters()).device)
        self.sharded = make_sharded(model, config)
        home = model if self.sharded is None else self.sharded.twin
        self.trained = {n: p for n, p in home.named_parameters() if p.requires_grad}
        assert self.trained, "nothing to train: no parameter requires a gradient"
        self.raw_optimizer = _optimizer(config, list(self.trained.values()))
        self._own_forward = "forward" in model.__dict__
        if self.accelerator.num_processes > 1:
            for loader in self.loaders.values():
                loader.take_shard(self.accelerator.process_index, self.accelerator.num_processes)
        if self.sharded is None:
            self.prepared, self.optimizer = self.accelerator.prepare(
                model, self.raw_optimizer, device_placement=[False, None]
            )  # models come placed, some over several devices
        else:
            self.prepared = home
            self.optimizer = self.accelerator.prepare_optimizer(self.raw_optimizer)
        self._forward = forward
        self.first_bad = torch.full((), -1, device=self.accelerator.device)
        self.logit_stats: tuple[Tensor, Tensor] | None = None
        self._measures = False
        self.last: dict[str, float] = {}
        self.peak: dict[str, float] = {}

    def splitting(self) -> contextlib.AbstractContextManager[None]:
        """Parameters are split over the processes inside, if at all."""
        return contextlib.nullcontext() if self.sharded is None else self.sharded.training()

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """The model has whole parameters inside, for whoever looks or writes."""
        return contextlib.nullcontext() if self.sharded is None else self.sharded.whole()

    def forward(self, batch: Batch) -> Tensor:
        if self.sharded is None:
            logits = self._forward(self.prepared, batch)
        else:
            with self.accelerator.autocast():  # elsewhere part of what is prepared
                logits = self._forward(self.prepared, batch)
            low = logits.dtype in (torch.bfloat16, torch.float16)
            mixed = self.config.mixed_precision != "no"
            logits = logits.float() if low and mixed else logits
        if self._measures:
            values = logits.detach().float()
            self.logit_stats = (values.mean(), values.std(correction=0))
        return logits

    def logs(self, step: int) -> bool:
        return (step + 1) % self.config.log_every == 0 or step == 0 or step + 1 == self.total

    def saves(self, step: int) -> bool:
        return (step + 1) % self.config.checkpoint_every == 0 and step + 1 < self.total

    def evaluates(self, step: int) -> bool:
        every = self.config.evaluate_every
        return every > 0 and ((step + 1) % every == 0 or step + 1 == self.total)

    def evaluate(
        self, watch: Watch, step: int, tracker: ScalarSink | None
    ) -> Mapping[str, float | None]:
        """Measures the model as it is; random streams and training mode are put back."""
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        with self.whole():
            modes = [(module, module.training) for module in self.model.modules()]
            with torch.random.fork_rng(devices=devices), reuse_weights(self.model):
                metrics = watch(self.model.eval(), step + 1)
            for module, training in modes:
                module.training = training
        if tracker is not None and self.accelerator.is_main_process:
            known = {f"evaluation/{k}": v for k, v in metrics.items() if v is not None}
            tracker.scalars(step + 1, known)
        return metrics

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step; returns scalars when this step is logged."""
        rate = learning_rate(self.config, step, self.total, self.warmup)
        for group in self.raw_optimizer.param_groups:
            group["lr"] = rate
        self._measures = self.logs(step)
        sums: dict[str, Tensor] = {}
        with self._micro_batches():
            for _ in range(self.config.accumulation):
                self._micro_step(step, sums)
        if not self.logs(step):
            return {}
        losses = {f"loss/{k}": float(v) / self.config.accumulation for k, v in sums.items()}
        return {**losses, "lr": rate, **self.last}

    def _micro_batches(self) -> contextlib.AbstractContextManager[None]:
        """Micro-batches share the effective weights: the last one's forward precedes the step."""
        several = self.config.accumulation > 1 and self.sharded is None
        return reuse_weights(self.model) if several else contextlib.nullcontext()

    def _micro_step(self, step: int, sums: dict[str, Tensor]) -> None:
        """One micro-batch, and the optimizer's step after the last of them."""
        with self.accelerator.accumulate(self.prepared):
            terms, batches = self._backward()
            for name, value in terms.parts.items():
                sums[name] = sums.get(name, value.detach() * 0) + value.detach()
            self._watch(step, terms)
            if self.accelerator.sync_gradients:
                if self.logs(step):
                    self.last = self._norms()
                    if self._probes(step):
                        self.last |= self._probe(batches)
                self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _backward(self) -> tuple[Terms, dict[str, Batch]]:
        batches = {part: self.loaders[part].next() for part in self.objective.parts}
        terms = self.objective(self.forward, batches)
        total = terms.total
        if self.penalty is None:
            self.accelerator.backward(total)
            return terms, batches
        if self.sharded is not None:  # a second one: the first one's may reduce on another stream
            self.accelerator.backward(total)
            extra = whole_tensor(self.penalty(self.sharded.twin))
            self.accelerator.backward(extra)
            return Terms(total + extra, {**terms.parts, "penalty": extra}), batches
        extra = self.penalty(self.model)
        self.accelerator.backward(total + extra)
        return Terms(total + extra, {**terms.parts, "penalty": extra}), batches

    def _watch(self, step: int, terms: Terms) -> None:
        values = torch.stack([terms.total, *terms.parts.values()]).detach().float()
        bad = ~(values.isfinite().all() & (values.abs() <= self.config.loss_cap).all())
        unset = self.first_bad < 0
        self.first_bad = torch.where(bad & unset, step + 1, self.first_bad)

    def guard(self, step: int, *, sync: bool = False, final: bool = False) -> None:
        """Raises if a loss was bad: every step on a CPU, else where ``sync`` or logs wait anyway.

        A checkpoint waits, so that no run ever resumes from behind its first bad step.
        """
        if self.first_bad.device.type == "cpu" or self.logs(step) or sync or final:
            bad = int(self.accelerator.gather(self.first_bad).max())  # all ranks raise together
            if bad > 0:
                raise Diverged(bad, f"loss not finite or above {self.config.loss_cap:g}")
        if final:
            with self.whole():
                for name, parameter in self.model.named_parameters():
                    if name in self.trained and not bool(parameter.detach().isfinite().all()):
                        raise Diverged(step + 1, f"parameter {name} is not finite")

    def _clip(self) -> None:
        if self.config.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(list(self.trained.values()), self.config.max_grad_norm)

    def _group(self, name: str) -> str:
        leaf = name.rpartition(".")[2]
        return {"A": "A", "Bt": "B"}.get(leaf, self.component_of(name))

    def _norms(self) -> dict[str, float]:
        """Frobenius norms of gradients and weights of what is trained, by component."""
        squares: dict[str, Tensor] = {}
        scaler = self.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        for name, parameter in self.trained.items():
            group = self._group(name)
            for kind, tensor, unit in (
                ("grad_norm", parameter.grad, scale),
                ("weight_norm", parameter, 1.0),
            ):
                if tensor is None:
                    continue
                key = f"{kind}/{group}"
                square = whole_tensor(tensor.detach().float().square().sum()) / unit**2
                square = square.to(self.accelerator.device)  # a model may lie on several
                squares[key] = squares[key] + square if key in squares else square
        return {key: math.sqrt(max(float(value), 0.0)) for key, value in squares.items()}

    def _probes(self, step: int) -> bool:
        every = self.config.probe_every
        return every > 0 and (step == 0 or (step + 1) % every == 0 or step + 1 == self.total)

    def _probe(self, batches: Mapping[str, Batch]) -> dict[str, float]:
        """Gradient norms with respect to every effective weight matrix, frozen or not.

        The gradient with respect to a frozen W0 under an adapter is the gradient with respect to
        the effective weight W0 + dW: what the paper's dynamics figures show.  Looking changes
        nothing: random streams and running statistics are put back.
        """
        device = self.accelerator.device
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        matrices = {
            n: p for n, p in self.model.named_parameters() if p.ndim == 2 and p.is_floating_point()
        }
        frozen = [p for p in matrices.values() if not p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            weights = {n: p for n, p in matrices.items() if n.rpartition(".")[2] not in ("A", "Bt")}
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                terms = self.objective(lambda batch: self._forward(self.model, batch), batches)
            grads = torch.autograd.grad(terms.total, list(weights.values()), allow_unused=True)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        squares: dict[str, float] = {}
        for name, grad in zip(weights, grads, strict=True):
            if grad is not None:
                key = f"probe_grad_norm/{self.component_of(name)}"
                squares[key] = squares.get(key, 0.0) + float(grad.float().square().sum())
        norms = {key: math.sqrt(value) for key, value in squares.items()}
        return norms | self._effective_norms()

    def _effective_norms(self) -> dict[str, float]:
        layers = dict(adapted_layers(self.model))
        squares: dict[str, float] = {}
        with torch.no_grad():
            for name, module in self.model.named_modules():
                if isinstance(module, BoundedLinear):
                    weight: Tensor | None = layers[name].weight + layers[name].delta()
                elif isinstance(module, nn.Linear) and name.removesuffix(".base") not in layers:
                    weight = dense_weight(module)
                else:
                    continue
                if weight is None:
                    continue
                key = f"effective_weight_norm/{self.component_of(name + '.weight')}"
                squares[key] = squares.get(key, 0.0) + float(weight.float().square().sum())
        return {key: math.sqrt(value) for key, value in squares.items()}

    def measure(self, step: int) -> dict[str, float]:
        """Logit statistics and adapter statistics at a logged step."""
        values: dict[str, float] = {}
        if self.logit_stats is not None:
            mean, spread = self.logit_stats
            values |= {"logits/mean": float(mean), "logits/spread": float(spread)}
        if any(True for _ in adapted_layers(self.model)):
            with self.whole():
                statistics = adapter_statistics(self.model)
            values |= {f"adapter/{key}": value for key, value in statistics.items()}
        return values

    def note(self, scalars: Mapping[str, float]) -> None:
        """Keeps the last and the largest value of everything logged."""
        self.last = dict(scalars)
        for key, value in scalars.items():
            if math.isfinite(value):
                self.peak[key] = max(self.peak.get(key, -math.inf), value)

    def close(self) -> None:
        """Gives the caller's model back without accelerate's wrapping, whatever happened."""
        if self.sharded is None:
            self.accelerator.unwrap_model(self.prepared, keep_fp32_wrapper=False)
        if not self._own_forward:
            self.model.__dict__.pop("forward", None)
        self.raw_optimizer.zero_grad(set_to_none=True)

    # Checkpoints ---------------------------------------------------------------------------------

    def _state(self) -> TrainingState:
        device, scaler = self.accelerator.device, self.accelerator.scaler
        return TrainingState(
            self.model, self.trained, self.raw_optimizer, self.stateful, device, scaler
        )

    def _identity(self) -> str:
        shapes = {name: list(parameter.shape) for name, parameter in self.trained.items()}
        config = self.config.model_dump(mode="json")
        return json.dumps([self.seed, shapes, sorted(self.stateful), config], sort_keys=True)

    def save(self, path: Path, step: int) -> None:
        """Writes everything needed to continue; all processes must call it."""
        self._state().save(
            path,
            step=step,
            identity=self._identity(),
            notes=(_finite(self.last), self.peak),
            writes=self.accelerator.is_main_process,
        )

    def resume(self, path: Path | None) -> int:
        """Loads a checkpoint of this very run if there is one; returns the next step."""
        if path is None or not path.is_file():
            return 0
        step, (self.last, self.peak) = self._state().load(path, self._identity())
        return step


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if math.isfinite(value)}


def _optimizer(config: FitConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW or SGD; weight decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, eps=config.eps, fused=True)
