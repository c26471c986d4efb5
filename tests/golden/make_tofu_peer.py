"""How ``tofu_peer.json`` and its neighbours were made; see ``tofu_peer.md``.

``prepare FOLDER`` writes models, tokenizer, data and stand-ins for what the peer imports but does
not use; ``collect FOLDER`` reads what the peer wrote.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.readers import TextDataConfig, load_corpus
from stable_forgetting.language.data.source import TextSource
from stable_forgetting.language.data.templates import make_template
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.models.backbone import causal_forward
from stable_forgetting.language.models.build import build_model

HERE = Path(__file__).parent
NAME = "tofu_peer"
ROWS = {"forget": 10, "retain": 10, "real_authors": 6, "world_facts": 6, "holdout": 8}
MODELS = {
    "gpt_neo": CausalModelConfig(kind="gpt_neo", dim=32, depth=2, heads=2, style="openunlearning"),
    "llama": CausalModelConfig(kind="llama", dim=32, depth=2, heads=2, style="openunlearning"),
}
"""The stand-in for the retrained model, and the one that is evaluated against it."""

SETS = {
    "forget10_perturbed": "forget",
    "forget10": "forget",
    "retain_perturbed": "retain",
    "real_authors_perturbed": "real_authors",
    "world_facts_perturbed": "world_facts",
    "holdout10": "holdout",
}


def choose() -> dict[str, list[Item]]:
    """A few items of each set of the generated corpus."""
    corpus = load_corpus(TextDataConfig.of(name="fictitious", authors=4, questions=10))
    full = [corpus.items[k] for k in corpus.where("full")]
    found = {"forget": full[-ROWS["forget"] :], "retain": full[: ROWS["retain"]]}
    for name in ("real_authors", "world_facts", "holdout"):
        found[name] = [corpus.items[k] for k in corpus.where(name)[: ROWS[name]]]
    return found


def train(kind: str, source: TextSource, indices: np.ndarray, until: float) -> torch.nn.Module:
    """A model that half remembers what it saw; weights are exact in half precision."""
    model = build_model(MODELS[kind], source.vocab_size, 0)
    model.config.eos_token_id = model.generation_config.eos_token_id = source.encoder.end
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = source.fetch(torch.from_numpy(indices))
    for _ in range(300):
        logits = causal_forward(model, batch)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        if loss < until:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.half().float() if tensor.is_floating_point() else tensor)
    return model.eval()


def prepare(folder: Path) -> None:
    """Writes everything that the peer reads."""
    chosen = choose()
    items = tuple(item for group in chosen.values() for item in group)
    corpus = Corpus(items, "generated")
    tokenizer = train_tokenizer(corpus, 400)
    source = TextSource(
        corpus, tokenizer, make_template("question_answer", "openunlearning"), max_length=512
    )
    known = np.arange(sum(ROWS.values()) - ROWS["holdout"])
    plans = {"gpt_neo": (known[ROWS["forget"] :], 0.3), "llama": (known, 0.8)}
    for kind, (indices, until) in plans.items():
        model = train(kind, source, indices, until)
        model.save_pretrained(folder / "models" / kind)
        tokenizer.save_pretrained(folder / "models" / kind)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token}
        (folder / "models" / kind / "tokenizer_config.json").write_text(json.dumps(about))
    data = folder / "locuslab" / "TOFU"
    data.mkdir(parents=True, exist_ok=True)
    for name, group in SETS.items():
        lines = [json.dumps(row(item, name)) for item in chosen[group]]
        (data / f"{name}.json").write_text("\n".join(lines) + "\n")
    configs = "\n".join(f"- config_name: {n}\n  data_files: {n}.json" for n in (*SETS, "retain90"))
    (data / "retain90.json").write_text((data / "retain_perturbed.json").read_text())
    (data / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    stand_ins(folder / "stubs")
    texts = {name: [asdict(item) for item in group] for name, group in chosen.items()}
    (folder / "texts.json").write_text(json.dumps(texts))


def row(item: Item, name: str) -> dict:
    """An item in the layout of the hub's data set."""
    found = {"question": item.question, "answer": item.answer}
    if name.endswith("_perturbed"):
        found["perturbed_answer"] = list(item.perturbed)
        if item.paraphrase:
            found["paraphrased_answer"] = item.paraphrase
    return found


def stand_ins(folder: Path) -> None:
    """Modules that the peer imports for training and for other benchmarks."""
    for name, text in {
        "deepspeed/__init__.py": "class DeepSpeedEngine: pass\n",
        "lm_eval/__init__.py": "def simple_evaluate(*a, **k): pass\n",
        "lm_eval/models/__init__.py": "",
        "lm_eval/models/hf_vlms.py": "class HFLM: pass\n",
        "lm_eval/tasks.py": "class TaskManager: pass\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def collect(folder: Path) -> None:
    """The peer's numbers of both models, our weights in half precision, and the tokenizer."""
    from safetensors.torch import load_file, save_file

    golden: dict = {"texts": json.loads((folder / "texts.json").read_text()), "models": {}}
    for kind in MODELS:
        evaluated = json.loads((folder / "out" / kind / "TOFU_EVAL.json").read_text())
        golden["models"][kind] = {name: numbers(value) for name, value in evaluated.items()}
        where = folder / "models" / kind
        weights = {n: t.half() for n, t in load_file(where / "model.safetensors").items()}
        save_file(weights, HERE / f"{NAME}_{kind}.safetensors")
    tokenizer = (folder / "models" / "llama" / "tokenizer.json").read_text()
    (HERE / f"{NAME}_tokenizer.json").write_text(json.dumps(json.loads(tokenizer)))
    (HERE / f"{NAME}.json").write_text(json.dumps(golden) + "\n")


def numbers(result: dict) -> dict:
    """An aggregate and per-sample values, without the texts that the peer stores along."""
    found: dict = {"agg_value": result.get("agg_value")}
    for part in ("forget", "holdout"):
        if part in result:
            found[part] = {k: v["score"] for k, v in result[part]["value_by_index"].items()}
    dropped = ("input", "ground_truth")
    found["value_by_index"] = {
        index: {k: v for k, v in values.items() if k not in dropped}
        for index, values in result.get("value_by_index", {}).items()
    }
    return found


if __name__ == "__main__":
    {"prepare": prepare, "collect": collect}[sys.argv[1]](Path(sys.argv[2]))
