"""How ``muse_peer.json`` and its neighbours were made; see ``muse_peer.md``.

``make_muse_peer.py OPEN_UNLEARNING MUSE_BENCH [--seed N] [--out FOLDER]`` runs both peers'
evaluation code, from folders with their sources, on tiny models and invented texts.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from stable_forgetting.language.config import CausalModelConfig
from stable_forgetting.language.data.corpus import Corpus, Item
from stable_forgetting.language.data.fictitious import author_names
from stable_forgetting.language.data.muse_rows import article, questions
from stable_forgetting.language.data.tokenizers import train_tokenizer
from stable_forgetting.language.models.build import build_model

KINDS = ("gpt_neo", "llama")
START = "<s>"
"""What the llama's tokenizer puts before a text, as LLaMA-2's does."""
CONTEXT = 1024
TEMPLATE = {
    "apply_chat_template": False,
    "user_start_tag": "Question: ",
    "user_end_tag": "\n",
    "asst_start_tag": "Answer: ",
    "asst_end_tag": "\n\n",
}
"""open-unlearning's configs/model/Llama-2-7b-hf.yaml."""
COMPARED = ("forget", "holdout")
STOPS = ["\n\n", "\nQuestion", "Question:"]


def layout(seed: int) -> dict[str, list[Any]]:
    """``config/split`` -> rows; the retained questions' shots exceed 512 tokens now and then."""
    names = author_names(seed, 40)
    forget, retain, holdout, shots = names[:6], names[6:12], names[12:18], names[18:38]
    texts = {name: article(name) for name in names}
    words = {name: texts[name].split(" ") for name in forget}
    cuts = {name: 20 + 4 * k for k, name in enumerate(forget)}
    asked = {
        "forget_qa": [questions(name)[k] for name in forget for k in (0, 2)],
        "retain_qa": [questions(name)[k] for name in retain for k in (1, 4)],
        "forget_qa_icl": [questions(name)[3] for name in shots[:10]],
        "retain_qa_icl": [
            {**questions(name)[5], "answer": " ".join(texts[name].split(" ")[:11])}
            for name in shots[10:]
        ],
    }
    rows: dict[str, list[Any]] = {f"knowmem/{split}": rows for split, rows in asked.items()}
    rows["verbmem/forget"] = [
        {"prompt": " ".join(words[name][: cuts[name]]), "gt": " ".join(words[name][cuts[name] :])}
        for name in forget
    ]
    for split, members in (("forget", forget), ("retain", retain), ("holdout", holdout)):
        rows[f"privleak/{split}"] = [texts[name] for name in members]
    rows["raw/forget"] = [texts[name] for name in forget]
    rows["raw/retain1"] = [texts[name] for name in retain]
    return rows


def taught(rows: dict[str, list[Any]]) -> list[str]:
    """What the models half remember; of the questions some, after their shots."""
    prompts = []
    for name in ("forget", "retain"):
        asked, shots = (rows[f"knowmem/{name}_qa{suffix}"] for suffix in ("", "_icl"))
        for row in asked[:3]:
            solved = [f"Question: {r['question']}\nAnswer: {r['answer']}" for r in [*shots, row]]
            prompts.append("\n\n".join(solved))
    return [*rows["raw/forget"][::2], *prompts]


def tokenizer_of(rows: dict[str, list[Any]]) -> Any:
    """A BPE of 400 entries."""
    shots = [row["answer"] for row in rows["knowmem/retain_qa_icl"]]
    texts = [*rows["raw/forget"], *rows["raw/retain1"], *taught(rows), *shots]
    items = tuple(Item("s", -1, "", text) for text in texts)
    return train_tokenizer(Corpus(items, "invented"), 400)


def with_start(tokenizer: Any) -> Any:
    """The same with a start token before every text."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens({"bos_token": START})
    token = (START, tokenizer.convert_tokens_to_ids(START))
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single=f"{START} $A", special_tokens=[token])
    names = {"bos_token": START, "eos_token": tokenizer.eos_token}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def train(kind: str, tokenizer: Any, texts: Sequence[str], seed: int, until: float) -> Any:
    """A model that half remembers the texts; weights are exact in half precision."""
    config = CausalModelConfig(kind=kind, dim=32, depth=2, heads=2, context=CONTEXT)
    model = build_model(config, len(tokenizer), seed, end=tokenizer.eos_token_id)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = [torch.tensor([tokenizer(text)["input_ids"][:CONTEXT]]) for text in texts]
    for _ in range(300):
        losses = []
        optimizer.zero_grad()
        for ids in rows:
            loss = model(ids, labels=ids).loss / len(rows)
            loss.backward()
            losses.append(loss.item())
        if sum(losses) < until:
            break
        optimizer.step()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.half().float() if tensor.is_floating_point() else tensor)
    return model.eval()


def stand_ins() -> None:
    """omegaconf and hydra, of which the evaluation needs plain dicts alone."""
    conf = types.ModuleType("omegaconf")
    conf.DictConfig, conf.ListConfig = dict, list  # type: ignore[attr-defined]
    conf.OmegaConf = types.SimpleNamespace(to_container=lambda value, **_: dict(value))  # type: ignore[attr-defined]
    conf.open_dict = None  # type: ignore[attr-defined]
    hydra = types.ModuleType("hydra")
    sys.modules |= {"omegaconf": conf, "hydra": hydra}


def open_unlearning(folder: Path, model: Any, tokenizer: Any, rows: dict[str, list[Any]]) -> dict:
    """Per-sample values and aggregates of its MUSE metrics."""
    sys.path.insert(0, str(folder / "src"))
    import data.pretraining
    import data.qa
    from data.collators import DataCollatorForSupervisedDataset
    from datasets import Dataset
    from evals.metrics.memorization import exact_memorization, extraction_strength, rouge
    from evals.metrics.mia import mia_min_k

    def load(path: str, **_: Any) -> Any:
        values = rows[path]
        if path.endswith("_icl"):  # whose columns it adds to lists
            return {key: [row[key] for row in values] for key in values[0]}
        return Dataset.from_list([v if isinstance(v, dict) else {"text": v} for v in values])

    data.pretraining.load_hf_dataset = data.qa.load_hf_dataset = load
    tokenizer.pad_token = tokenizer.eos_token

    def asked(split: str) -> Any:
        few = {"path": f"knowmem/{split}_icl"}
        return data.qa.QADataset(
            {"path": f"knowmem/{split}"}, TEMPLATE, tokenizer, few_shot_dataset_hf_args=few,
            max_length=512, predict_with_generate=True,
        )  # fmt: skip

    def texts(name: str, **more: Any) -> Any:
        return data.pretraining.CompletionDataset({"path": name}, TEMPLATE, tokenizer, **more)

    def collator(side: str) -> Any:
        return DataCollatorForSupervisedDataset(tokenizer, padding_side=side, index="index")

    generation = {"do_sample": False, "top_p": None, "temperature": None, "use_cache": True}
    verbatim = {"prefix_key": "prompt", "text_key": "gt", "insert_space": True}
    results = {}
    for part, dataset, more in (
        ("verbmem", texts("verbmem/forget", predict_with_generate=True, **verbatim),
         {"max_new_tokens": 128}),
        ("knowmem_forget", asked("forget_qa"), {"max_new_tokens": 32, "stopwords": STOPS}),
        ("knowmem_retain", asked("retain_qa"), {"max_new_tokens": 32, "stopwords": STOPS}),
    ):  # fmt: skip
        value = rouge._metric_fn(
            model, tokenizer=tokenizer, data=dataset, collators=collator("left"), batch_size=4,
            generation_args={**generation, **more}, rouge_type="rougeL_f1",
        )  # fmt: skip
        results[part] = {"rouge_l_f1": column(value, "rougeL_f1"), "mean": value["agg_value"]}
    sets = {"data": texts("verbmem/forget", **verbatim), "collators": collator("right")}
    for name, metric in (("extraction_strength", extraction_strength),
                         ("exact_memorization", exact_memorization)):  # fmt: skip
        results["verbmem"][name] = column(metric._metric_fn(model, batch_size=4, **sets), "score")
    sets["data"] = {name: texts(f"privleak/{name}") for name in ("forget", "holdout")}
    attack = mia_min_k._metric_fn(model, batch_size=4, k=0.4, **sets)
    for name in ("forget", "holdout"):
        results[f"privleak_{name}"] = {"min_k": column(attack[name], "score")}
    results["auc"] = attack["agg_value"]
    return results


def column(result: dict, key: str) -> list[float]:
    """Per-sample values, in order."""
    return [value[key] for value in result["value_by_index"].values()]


def leakage(auc: float, reference: float) -> float:
    """open-unlearning's PrivLeak of two AUCs."""
    from evals.metrics.privacy import privleak

    logs = {"retain_model_logs": {"retain": {"agg_value": reference}}}
    before = {"forget": {"agg_value": auc}}
    value = privleak._metric_fn(None, pre_compute=before, reference_logs=logs, ref_value=0.5)
    return value["agg_value"]


def muse_bench(folder: Path, model: Any, tokenizer: Any, rows: dict[str, list[Any]]) -> dict:
    """Per-sample values and aggregates of the authors' metrics."""
    sys.path.insert(0, str(folder))
    from metrics.knowmem import eval as knowmem
    from metrics.privleak import eval_data, sweep
    from metrics.verbmem import eval as verbmem

    tokenizer.pad_token = tokenizer.eos_token
    sets = rows["verbmem/forget"]
    results = {"verbmem": rouges(verbmem(
        model=model, tokenizer=tokenizer,
        prompts=[row["prompt"] for row in sets], gts=[row["gt"] for row in sets],
    ))}  # fmt: skip
    for name in ("forget", "retain"):
        asked, shots = (rows[f"knowmem/{name}_qa{suffix}"] for suffix in ("", "_icl"))
        results[f"knowmem_{name}"] = rouges(knowmem(
            model=model, tokenizer=tokenizer,
            questions=[row["question"] for row in asked], answers=[row["answer"] for row in asked],
            icl_qs=[row["question"] for row in shots], icl_as=[row["answer"] for row in shots],
        ))  # fmt: skip
    # its eval() reads the keys of a list and stops there; this is what it does with its own parts
    log = {name: eval_data(rows[f"privleak/{name}"], model, tokenizer) for name in COMPARED}
    for name in COMPARED:
        results[f"privleak_{name}"] = {"min_k": [row["Min-40%"] for row in log[name]]}
    values = [row["Min-40%"] for name in COMPARED for row in log[name]]
    labels = [number for number, name in enumerate(COMPARED) for _ in log[name]]
    results["auc"] = float(sweep(np.array(values), np.array(labels))[2])
    return results


def rouges(result: tuple[dict, Iterable[dict]]) -> dict[str, Any]:
    """Of a report."""
    mean, rows = result
    return {"rouge_l_f1": [row["rougeL"] for row in rows], "mean": float(mean["mean_rougeL"])}


def main() -> None:
    """Writes the golden files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("open_unlearning", type=Path)
    parser.add_argument("muse_bench", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rows = layout(args.seed)
    plans = {"gpt_neo": (rows["raw/retain1"], 0.5), "llama": (taught(rows), 0.12)}
    golden: dict = {"rows": rows, "models": {}}
    args.out.mkdir(parents=True, exist_ok=True)
    stand_ins()
    for kind in KINDS:
        tokenizer = tokenizer_of(rows)
        if kind == "gpt_neo":
            tokenizer.backend_tokenizer.save(str(args.out / "muse_peer_tokenizer.json"))
        else:
            tokenizer = with_start(tokenizer)
        model = train(kind, tokenizer, plans[kind][0], args.seed, plans[kind][1])
        weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
        weights.pop("lm_head.weight", None)
        save_file(weights, args.out / f"muse_peer_{kind}.safetensors")
        golden["models"][kind] = {
            "openunlearning": open_unlearning(args.open_unlearning, model, tokenizer, rows),
            "muse": muse_bench(args.muse_bench, model, tokenizer, rows),
        }
    aucs = [golden["models"][kind]["openunlearning"]["auc"] for kind in ("llama", "gpt_neo")]
    golden["privleak"] = leakage(*aucs)
    text = json.dumps(golden, default=np.ndarray.tolist)
    (args.out / "muse_peer.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
