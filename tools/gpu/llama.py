"""A model of LLaMA-2-7B's shape through the project's own stages: seconds and memory.

Its weights are random and bfloat16, its adapters float32; what is measured is not what it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from stable_forgetting.common.store.stages import DONE
from tools.faults.child import Child
from tools.gpu.items import Job, Row
from tools.gpu.stores import fresh, last_line, unlearn

SHAPE = "llama-2-7b"
STEPS = 20


def suite(folder: Path, tiny: bool) -> dict[str, Any]:
    """Fine-tuning, bounded unlearning and its LoRA control on a folder's model."""
    steps = 2 if tiny else STEPS
    authors = 3 if tiny else 20
    return {
        "suite": "gpu-llama",
        "benchmark": "tofu",
        "protocol": {
            "data": {"name": "fictitious", "authors": authors, "forget_authors": 2},
            "model": {
                "name": str(folder),
                "original": str(folder),
                "retrain": {"1-authors": str(folder)},  # training it would take 16 bytes a weight
                "dtype": "bfloat16",
                "gradient_checkpointing": False,
            },
            "scenario": {"kind": "authors", "forget_authors": 1},
            "train": {"steps": 1, "batch_size": 1},
            "evaluation": {"max_new_tokens": 4 if tiny else 32, "retain_samples": 20},
            "minimum_train_accuracy": 0,
        },
        "seeds": [1],
        "retrains": 1,
        "columns": ["mu"],
        "defaults": {"steps": steps, "batch_size": 2 if tiny else 8, "mixed_precision": "bf16"},
        "methods": dict.fromkeys(("original", "retrain", "finetune_lora", "gd_lora", "gd_sine")),
    }


def write_model(folder: Path, device: str, tiny: bool) -> None:
    """A folder in the hub's layout: random weights, a byte-level tokenizer."""
    import torch

    from stable_forgetting.language.data.corpus import Corpus, Item
    from stable_forgetting.language.data.tdec import notes
    from stable_forgetting.language.data.tokenizers import train_tokenizer
    from stable_forgetting.language.models.families import published_models, tiny_family
    from tools.gpu.models import random_causal

    texts = islice(notes(), 20 if tiny else 400)  # they never end
    words = Corpus(tuple(Item("train", -1, "", text) for text in texts), "")
    tokenizer = train_tokenizer(words, 400 if tiny else 4000)
    family, model = published_models()[SHAPE]
    fields = dict(model.sizes)
    if tiny:
        shape = tiny_family(family.model_type).tiny
        assert shape is not None
        fields = {**shape(16, 2, 2), "vocab_size": len(tokenizer) + 8}
    tokenizer.save_pretrained(folder)
    drawn = random_causal(family.model_type, fields, device, torch.bfloat16)
    drawn.config.eos_token_id = tokenizer.eos_token_id
    drawn.save_pretrained(folder)


def stages(job: Job) -> Iterator[Row]:
    """One row per stage: what it cost."""
    folder = job.work / "model"
    if not (folder / "config.json").is_file():
        job.work.mkdir(parents=True, exist_ok=True)
        writing = Child(job.work / "writing", lambda: write_model(folder, job.device, job.tiny))
        made = writing.wait(job.seconds)
        if made.code:
            says = made.err.strip()[-300:] or f"writing the model ended with code {made.code}"
            yield {"stage": "model", "says": says, "ok": False}
            return
    path, store = job.work / "suite.yaml", fresh(job, "store")
    path.write_text(json.dumps(suite(folder, job.tiny)), encoding="utf-8")  # JSON is YAML
    ended = unlearn(job, "run", path, "--store", store, "--executor", "inline")
    for done in sorted(store.glob(f"stages/*/{DONE}"), key=lambda file: file.stat().st_mtime):
        facts = json.loads(done.read_text(encoding="utf-8"))
        cost = facts.get("cost") or {}
        row = {"stage": facts["name"], "kind": facts["kind"], "stage s": facts["stage_seconds"]}
        steps, seconds, peak = (cost.get(key) for key in ("steps", "seconds", "peak_bytes"))
        row |= {"steps": steps, "ms per step": 1e3 * seconds / steps if steps and seconds else None}
        yield {**row, "peak GB": peak / 1e9 if peak else None}
    yield {"stage": "all", "kind": "run", "says": last_line(ended), "ok": ended.code == 0}
