"""The training loop itself."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from common.base.errors import Diverged
from common.bounded.attach import BoundedLinear, adapted_layers
from common.bounded.quantised import dense_weight
from common.bounded.reuse import reuse_weights
from common.bounded.statistics import adapter_statistics
from common.data.batch import Batch
from common.data.loader import Loader
from common.objectives.objectives import Objective, ObjectiveValue
from common.train.checkpoint import TrainingState
from common.train.config import FitConfig
from common.train.launch import make_accelerator, make_sharded
from common.train.protocols import ModelForward, ScalarSink, Stateful, Watch
from common.train.rates import _optimizer, learning_rate, total_steps, warmup_steps
from common.train.sharding import whole_tensor
from common.train.telemetry import _finite


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

    def _backward(self) -> tuple[ObjectiveValue, dict[str, Batch]]:
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
            return ObjectiveValue(total + extra, {**terms.parts, "penalty": extra}), batches
        extra = self.penalty(self.model)
        self.accelerator.backward(total + extra)
        return ObjectiveValue(total + extra, {**terms.parts, "penalty": extra}), batches

    def _watch(self, step: int, terms: ObjectiveValue) -> None:
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
