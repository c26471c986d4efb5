"""The steps of one training run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from stable_forgetting.common.base import stopping
from stable_forgetting.common.base.config import did_you_mean
from stable_forgetting.common.base.errors import ConfigError, Diverged
from stable_forgetting.common.bounded.layer import reuse_weights
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.data.loader import Loader
from stable_forgetting.common.objectives.objectives import Objective, ObjectiveValue
from stable_forgetting.common.train.checkpoint import due_at, resume, save
from stable_forgetting.common.train.config import (
    FitConfig,
    evaluation_steps,
    learning_rate,
    total_steps,
    warmup_steps,
)
from stable_forgetting.common.train.launch import make_accelerator, make_sharded
from stable_forgetting.common.train.optimizer import make_optimizer
from stable_forgetting.common.train.protocols import Hooks, ModelForward, Stateful, Telemetry
from stable_forgetting.common.train.rehearsal import Ends
from stable_forgetting.common.train.sharding import whole_tensor
from stable_forgetting.common.train.telemetry import (
    DivergenceGuard,
    Instruments,
    first_nonfinite,
    has_adapters,
    looking,
)

_PREPARED = "_is_accelerate_prepared"
"""Accelerate's mark on a model, which it then takes as it is, without autocast."""
_TOTAL = ""
"""Key of the whole objective beside its parts."""


class TrainingRun:
    """One call of :func:`common.train.fit.fit`, whose arguments it takes."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        loaders: Mapping[str, Loader],
        config: FitConfig,
        forward: ModelForward,
        seed: int,
        hooks: Hooks,
        telemetry: Telemetry,
        ends: Ends | None = None,
    ):
        self.seed, self.ends = seed, ends
        self.config, self.model, self.objective = config, model, objective
        self.hooks, self.telemetry = hooks, telemetry
        self.loaders = dict(loaders)
        self.stateful: dict[str, Stateful] = {**self.loaders, **hooks.stateful}
        if ends is not None:
            ends.prepare(loaders)
        self.total = total_steps(config, loaders)
        self.warmup = warmup_steps(config, loaders)
        self.evaluate_every, self.stops_from = evaluation_steps(config, loaders)
        if ends is not None:
            few = min(config.accumulation, ends.rehearsal.accumulation)
            self.config = config = config.model_copy(update={"accumulation": few})
        self.device = next(model.parameters()).device  # accelerate knows one accelerator only
        self.accelerator = make_accelerator(config, self.device)
        self.sharded = make_sharded(model, config)
        home = model if self.sharded is None else self.sharded.twin
        self.trained = {n: p for n, p in home.named_parameters() if p.requires_grad}
        assert self.trained, "nothing to train: no parameter requires a gradient"
        self.raw_optimizer = make_optimizer(config, self.trained)
        self._rates = [group["lr"] for group in self.raw_optimizer.param_groups]
        self._own_forward = "forward" in model.__dict__
        if self.accelerator.num_processes > 1:
            for loader in self.loaders.values():
                loader.take_shard(self.accelerator.process_index, self.accelerator.num_processes)
        if self.sharded is None:
            model.__dict__.pop(_PREPARED, None)  # a copy of a model in training has the mark too
            self.prepared, self.optimizer = self.accelerator.prepare(
                model, self.raw_optimizer, device_placement=[False, None]
            )  # models come placed, some over several devices
        else:
            self.prepared = home
            self.optimizer = self.accelerator.prepare_optimizer(self.raw_optimizer)
        self._forward = forward
        self.guard = DivergenceGuard(config.loss_cap, self.device)
        self.instruments = Instruments(model, self.trained, telemetry.component_of, self.device)
        self._started, self.earlier = time.perf_counter(), 0.0
        self.saved = self._started
        self._norms: dict[str, float] = {}
        self._logged, self.loss = False, math.nan

    def splitting(self) -> contextlib.AbstractContextManager[None]:
        """Parameters are split over the processes inside, if at all."""
        return contextlib.nullcontext() if self.sharded is None else self.sharded.training()

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """The model has whole parameters inside, for whoever looks or writes."""
        return contextlib.nullcontext() if self.sharded is None else self.sharded.whole()

    def close(self) -> None:
        """Gives the caller's model back without accelerate's wrapping, whatever happened."""
        if self.sharded is None:
            self.accelerator.unwrap_model(self.prepared, keep_fp32_wrapper=False)
        self.model.__dict__.pop(_PREPARED, None)
        if not self._own_forward:
            self.model.__dict__.pop("forward", None)
        self.raw_optimizer.zero_grad(set_to_none=True)

    def train(self, checkpoint: Path | None, *, keeps_last: bool = True) -> str | None:
        """Takes all steps that a checkpoint does not hold already; says what stopped it early.

        Raises:
            Diverged: See :func:`common.train.fit.fit`.
        """
        torch.manual_seed(self.seed)
        step, stopped = resume(self, checkpoint)
        complete = stopped is not None or step == self.total
        with stopping.deferred():
            while step < self.total and stopped is None:
                asked = stopping.asked()
                due = checkpoint is not None and (due_at(self, step) or asked)
                saves = due and step + 1 < self.total
                self.step(step, sync=saves)
                stopped = self._stops(step)
                step = step + 1 if self.ends is None else self.ends.after(step, self.total)
                if checkpoint is not None and saves and stopped is None:
                    save(self, checkpoint, step)
                if self.telemetry.progress is not None:
                    self.telemetry.progress(step, self.total, self.loss)
                if asked and stopped is None and step < self.total:
                    raise stopping.Stopped
            self.total = step
            self.check(step - 1, final=True)
            if checkpoint is not None and keeps_last and not complete:
                save(self, checkpoint, step, stopped)
        return stopped

    @property
    def seconds(self) -> float:
        """Wall time of this run, earlier sittings included."""
        return self.earlier + time.perf_counter() - self._started

    def _after(self, step: int, scalars: dict[str, float], *, sync: bool) -> None:
        """What follows from an optimizer step: hooks, guard (see check), logs."""
        if self.hooks.after_step:
            with self.whole():
                for hook in self.hooks.after_step:
                    scalars.update(hook(self.model) or {})
        self.check(step, sync=sync)
        if self._logged:
            scalars.update(self.instruments.logits())
            if has_adapters(self.model):
                with self.whole():
                    scalars.update(self.instruments.adapters())
            self.instruments.note(scalars)
            self._log(step, scalars)

    def _log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.telemetry.tracker is not None and self.accelerator.is_main_process:
            self.telemetry.tracker.scalars(step + 1, scalars)

    # Evaluation ----------------------------------------------------------------------------------

    def _stops(self, step: int) -> str | None:
        """Evaluates where it is time to; a reason to stop, if there is one."""
        reason, evaluate = None, self.telemetry.evaluate_during
        every = self.evaluate_every
        last = step + 1 == self.total
        if evaluate is not None and every > 0 and ((step + 1) % every == 0 or last):
            with self.whole(), looking(self.model, self.device):
                metrics = evaluate(self.model, step + 1)
            values = {f"evaluation/{k}": v for k, v in metrics.items() if v is not None}
            self._log(step, values)
            if step + 1 >= self.stops_from:
                reason = reached(metrics, self.config.stop_below)
        if reason is None and self.hooks.stop_when is not None:
            with self.whole(), looking(self.model, self.device):
                reason = self.hooks.stop_when(self.model, step + 1)
        return reason if self.ends is None else None

    # One step ------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the prepared model, as the precision asks."""
        if self.sharded is None:
            logits = self._forward(self.prepared, batch)
        else:
            with self.accelerator.autocast():  # elsewhere part of what is prepared
                logits = self._forward(self.prepared, batch)
            low = logits.dtype in (torch.bfloat16, torch.float16)
            mixed = self.config.mixed_precision != "no"
            logits = logits.float() if low and mixed else logits
        if self._logged:
            self.instruments.see(logits)
        return logits

    def step(self, step: int, *, sync: bool) -> None:
        """One optimizer step, and whatever follows from it."""
        self._logged = (
            (step + 1) % self.config.log_every == 0
            or step == 0
            or step + 1 == self.total
            or self.ends is not None
        )
        rate = learning_rate(self.config, step, self.total, self.warmup)
        for group, full in zip(self.raw_optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate if full == self.config.lr else full * (rate / self.config.lr)
        sums: dict[str, Tensor] = {}
        moves = getattr(self.objective, "moves_weights", False)
        several = self.config.accumulation > 1 and self.sharded is None and not moves
        # micro-batches share the effective weights: the last forward precedes the step
        with reuse_weights(self.model) if several else contextlib.nullcontext():
            for _ in range(self.config.accumulation):
                with self.accelerator.accumulate(self.prepared):
                    batches = {part: self.loaders[part].next() for part in self.objective.parts}
                    terms = self._backward(self.objective(self.forward, batches))
                    for name, value in {_TOTAL: terms.total, **terms.parts}.items():
                        sums[name] = sums.get(name, value.detach() * 0) + value.detach()
                    self._update(step, terms, batches)
        scalars: dict[str, float] = {}
        if self._logged:
            self.loss = float(sums.pop(_TOTAL)) / self.config.accumulation
            losses = {f"loss/{k}": float(v) / self.config.accumulation for k, v in sums.items()}
            scalars = {**losses, "lr": rate, **self._norms}
        self._after(step, scalars, sync=sync)

    def _update(self, step: int, terms: ObjectiveValue, batches: Mapping[str, Batch]) -> None:
        """The optimizer's step after the last micro-batch; before it, the losses are watched."""
        losses = torch.stack([terms.total, *terms.parts.values()]).detach().float()
        self.guard.watch(step + 1, losses)
        if self.accelerator.sync_gradients:
            if self._logged:
                self._norms = self._measured_gradients(step, batches)
            if self.config.max_grad_norm is not None:
                trained = list(self.trained.values())
                self.accelerator.clip_grad_norm_(trained, self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, terms: ObjectiveValue) -> ObjectiveValue:
        """Gradients of an objective and of the penalty, which is added to its parts."""
        total, penalty = terms.total, self.hooks.penalty
        if penalty is None:
            self.accelerator.backward(total)
            return terms
        if self.sharded is not None:  # a second one: the first one's may reduce on another stream
            self.accelerator.backward(total)
            extra = whole_tensor(penalty(self.sharded.twin))
            self.accelerator.backward(extra)
        else:
            extra = penalty(self.model)
            self.accelerator.backward(total + extra)
        return ObjectiveValue(total + extra, {**terms.parts, "penalty": extra})

    def _measured_gradients(self, step: int, batches: Mapping[str, Batch]) -> dict[str, float]:
        """Norms before clipping, and at probes those of all effective weights."""
        scaler, every = self.accelerator.scaler, self.config.probe_every
        norms = self.instruments.norms(1.0 if scaler is None else scaler.get_scale())
        if every > 0 and (step == 0 or (step + 1) % every == 0 or step + 1 == self.total):
            with remembered(self.hooks.stateful.values()):
                norms |= self.instruments.probe(
                    self.objective, lambda batch: self._forward(self.model, batch), batches
                )
        return norms

    def check(self, step: int, *, sync: bool = False, final: bool = False) -> None:
        """Raises if a loss was bad: every step on a CPU, else where ``sync`` or logs wait anyway.

        A checkpoint waits, so that no run ever resumes from behind its first bad step.
        """
        bad = self.guard.first_bad
        if bad.device.type == "cpu" or self._logged or sync or final:
            first = int(self.accelerator.gather(bad).max())  # all ranks raise together
            if first > 0:
                raise Diverged(first, f"loss not finite or above {self.config.loss_cap:g}")
        if final:
            with self.whole():
                weights = self.model.named_parameters()
                name = first_nonfinite((n, p.detach()) for n, p in weights if n in self.trained)
                if name is not None:
                    raise Diverged(step + 1, f"parameter {name} is not finite")


@contextlib.contextmanager
def remembered(items: Iterable[Stateful]) -> Iterator[None]:
    """Puts the items' states back afterwards."""
    states = [(item, item.state()) for item in items]
    try:
        yield
    finally:
        for item, state in states:
            item.load_state(state)


def reached(
    metrics: Mapping[str, float | None], limits: Mapping[str, float | str] | str
) -> str | None:
    """The limits in words, such as ``forget_prob < 20``, once every metric is below its own.

    Raises:
        ConfigError: A name is none of the metrics, or a limit is no number yet.
    """
    if isinstance(limits, str):
        raise ConfigError("stop_below: goal: only a row of a suite knows its goals; give values")
    numbers: dict[str, float] = {}
    for name, limit in limits.items():
        if isinstance(limit, str):
            raise ConfigError(
                f"stop_below: {name}: retrain: only a row of a suite has a Retrain; give a value"
            )
        numbers[name] = limit
        if name not in metrics:
            raise ConfigError(
                f"stop_below: '{name}' is not measured{did_you_mean(name, [*metrics])}"
            )
    values = {name: metrics[name] for name in numbers}
    if not numbers or not all(v is not None and v < numbers[name] for name, v in values.items()):
        return None
    return ", ".join(f"{name} < {limit:g}" for name, limit in numbers.items())
