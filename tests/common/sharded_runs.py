"""Training runs that must not depend on how parameters are split; also a program, one per rank.

In float64, so that what the order of summation rounds off (and training amplifies: at these rates
up to 1e4 times) stays far below any mistake; one run also in the precisions that people use.

    python sharded_runs.py FOLDER [RUN ...]

writes ``FOLDER/<rank>-<run>.safetensors`` (weights) and ``FOLDER/<rank>.json`` (logged scalars).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))

import conftest as tiny

from stable_forgetting.common.bounded.attach import attach, clip_factors_, project_ball_
from stable_forgetting.common.bounded.config import AdapterConfig
from stable_forgetting.common.bounded.files import save_adapter
from stable_forgetting.common.data.batch import Batch
from stable_forgetting.common.objectives.objectives import CrossEntropy, gradient_difference
from stable_forgetting.common.train import checkpoint, loop
from stable_forgetting.common.train.config import FitConfig
from stable_forgetting.common.train.fit import fit
from stable_forgetting.common.train.sharding import Sharded

OBJECTIVE = gradient_difference(1.0, 0.3)


class Sink:
    def __init__(self):
        self.rows, self.share, self.gathered = {}, None, {}

    def scalars(self, step, values):
        self.rows.setdefault(step, {}).update(values)

    def rewind(self, step):
        self.rows = {s: row for s, row in self.rows.items() if s <= step}


class Stopped(Exception):
    pass


def adapted(phi="sine", base=None, targets=("*mlp.c_fc", "*mlp.c_proj")):
    model = tiny.make_net() if base is None else base
    targets = ("blocks.*.mlp.fc*",) if base is None else targets
    attach(model, targets, AdapterConfig(rank=3, phi=phi, omega=5.0), torch.Generator())
    return model


SIZES = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 12, "bos_token_id": 0}
SIZES |= {"max_position_embeddings": 8, "eos_token_id": 1}


def seeded(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def gpt_neo():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    more = {"num_layers": 2, "num_heads": 2, "window_size": 4}
    config = GPTNeoConfig(**SIZES, **more, attention_types=[[["global", "local"], 1]])
    return seeded(lambda: GPTNeoForCausalLM(config))


def llama():
    """Recomputes its blocks in backward; every weight is a bfloat16 number."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_hidden_layers=2, num_attention_heads=2)
    model = seeded(lambda: LlamaForCausalLM(config).bfloat16())
    old = model.gradient_checkpointing_enable  # its name before transformers 5
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
    return model


def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.inputs["x"].to(next(model.parameters()).dtype))


def last_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens = (batch.inputs["x"] * 2).long() % 4
    return model(input_ids=tokens).logits[:, -1]


def constrain(model):
    clip_factors_(model, 0.5)
    return {"outside": project_ball_(model, 0.05)}


def watch(model, step):
    batch = tiny.VectorSource().fetch(torch.arange(16))
    with torch.no_grad():
        return {"logit": float(forward(model, batch).square().mean())}


def squares(model):
    return sum(0.01 * parameter.square().sum() for parameter in model.parameters())


def note_pieces(model, sink, progress):
    """Which share of the children's entries this process holds while it trains."""

    def note(step, total, loss):
        held = whole = 0
        for parameter in (p for child in model.children() for p in child.parameters()):
            whole += parameter.numel()
            held += (
                parameter.to_local().numel()
                if isinstance(parameter, DTensor)
                else parameter.numel()
            )
        sink.share = held / whole
        if progress is not None:
            progress(step, total, loss)

    return note


def go(model, sink, objective=OBJECTIVE, forward=forward, options=None, **fields):
    dtype = fields.pop("dtype", torch.float64)
    model, source = model.to(dtype) if dtype else model, tiny.VectorSource()
    parts = {"retain": range(32), "forget": range(32, 48)}
    loaders = {part: tiny.make_loader(source, list(parts[part])) for part in objective.parts}
    fields = {"steps": 4, "batch_size": 8, "lr": 1e-2, "eps": 1e-3, "log_every": 1} | fields
    config = FitConfig(**fields)
    options = dict(options or {})
    options["progress"] = note_pieces(model, sink, options.get("progress"))
    options = tiny.wired(tracker=sink, **options)
    fit(model, objective, loaders, config, forward=forward, seed=3, **options)
    return model


def bounded(sink, folder):
    """Adapters with projections after each step and an evaluation in training."""
    options = {"after_step": [constrain], "evaluate_during": watch}
    model = go(adapted(), sink, options=options, evaluate_every=2)
    save_adapter(model, folder / f"adapter-{os.environ.get('RANK', 'one')}")
    return model


class Gathered(TorchDispatchMode):
    """Counts the bytes of numbers that processes give each other."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = tree_leaves((args, result))
            self.bytes += sum(
                t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()
            )
        return result


def counted(function, sink):
    """A function that adds the bytes that are gathered in it to those of ``sink``."""

    def run(*args, **kwargs):
        with Gathered() as gathered:
            result = function(*args, **kwargs)
        sink.gathered[function.__name__] = gathered.bytes
        return result

    return run


def stop(step, total, loss):
    if step == 3:
        raise Stopped


def begin(path, model, sink):
    """Stopped behind a checkpoint."""
    try:
        go(model, sink, options={"checkpoint": path, "progress": stop}, checkpoint_every=2)
    except Stopped:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        assert path.is_file()


def end(path, model, sink):
    """Gone on with from there."""
    return go(model, sink, options={"checkpoint": path}, checkpoint_every=2)


def resumed(sink, folder):
    """Twice in one process."""
    path = folder / f"checkpoint-of-{os.environ.get('WORLD_SIZE', 1)}.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save", counted(loop.save, sink))
        patch.setattr(checkpoint, "restore", counted(checkpoint.restore, sink))
        patch.setattr(Sharded, "_fill", counted(Sharded._fill, sink))
        begin(path, tiny.make_net(), sink)
        return end(path, tiny.make_net(), sink)


def begun(sink, folder):
    begin(folder / "moved.safetensors", tiny.make_net(), sink)
    return tiny.make_net()  # what was stopped is empty


def ended(sink, folder):
    """Perhaps by another number of processes."""
    return end(folder / "moved.safetensors", tiny.make_net(), sink)


def of_text(sink, model, **fields):
    return go(model, sink, CrossEntropy("retain"), forward=last_token, **fields)


def of_llama(sink, **fields):
    model = adapted(base=llama(), targets=("*mlp.*_proj",))
    return go(model, sink, forward=last_token, **fields)


def watched(sink, **fields):
    """All parameters of a llama; what a forward gathers is counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.TrainingRun, "forward", counted(loop.TrainingRun.forward, sink))
        return go(llama(), sink, forward=last_token, **fields)


def llama_whole_low(sink, folder):
    """All parameters of a bfloat16 model: float32 while they are trained, split or not."""
    before = llama().state_dict()
    model = watched(sink, **AS_IT_IS)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all((p != before[name]).any() for name, p in model.named_parameters() if p.ndim > 1)
    return model


SINGLE = {"dtype": torch.float32}
LOW = {**SINGLE, "mixed_precision": "bf16"}
AS_IT_IS = {"dtype": None, "mixed_precision": "bf16"}
"""As large models are trained: a bfloat16 model, bfloat16 products, what is trained in float32."""
RETAIN = CrossEntropy("retain")
RUNS = {
    "full": lambda sink, _: go(tiny.make_net(), sink, max_grad_norm=0.5, accumulation=2),
    "bounded": bounded,
    "plain_lora": lambda sink, _: go(adapted("identity"), sink),
    "penalised": lambda sink, _: go(tiny.make_net(), sink, RETAIN, options={"penalty": squares}),
    "resumed": resumed,
    "text": lambda sink, _: of_text(sink, gpt_neo()),  # tied embeddings, gathered by blocks
    "text_bounded": lambda sink, _: go(adapted(base=gpt_neo()), sink, forward=last_token),
    "double": lambda sink, _: go(adapted(), sink),
    "single": lambda sink, _: go(adapted(), sink, **SINGLE),
    "low": lambda sink, _: go(adapted(), sink, **LOW),
    "llama_double": lambda sink, _: of_llama(sink),
    "llama_single": lambda sink, _: of_llama(sink, **SINGLE),
    "llama_low": lambda sink, _: of_llama(sink, **AS_IT_IS),
    "llama_whole_single": lambda sink, _: watched(sink, **SINGLE),
    "llama_whole_low": llama_whole_low,
    "text_single": lambda sink, _: of_text(sink, gpt_neo(), **SINGLE),
    "text_low": lambda sink, _: of_text(sink, gpt_neo(), **LOW),  # LayerNorms get float32 sums
}
MOVED = {"begun": begun, "ended": ended}


def main(folder: Path, *names: str) -> None:
    rank, scalars = os.environ.get("RANK", "one"), {}
    for name in names or RUNS:
        run = (RUNS | MOVED)[name]
        sink = Sink()
        model = run(sink, folder)
        scalars[name] = {"share": sink.share, "rows": sink.rows, "gathered": sink.gathered}
        for parameter in model.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        save_file(weights, folder / f"{rank}-{name}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(scalars))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
