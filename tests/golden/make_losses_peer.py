"""How ``losses_peer.json`` was made; see ``losses_peer.md``.

``FOLDER`` holds clones of the peers under ``muse_bench``, ``FLAT``, ``Unlearn-Simple``,
``open-unlearning`` and ``loku``, whose code needs torchmetrics.  Their own loss code runs on logits
that a formula gives; what it imports and does not use is replaced by empty modules.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

HERE = Path(__file__).parent
NAME = "losses_peer"
ROWS, LENGTH, VOCABULARY = 3, 7, 11
STARTS = {"forget": (1, 3, 2), "retain": (2, 1, 4), "refusal": (1, 3, 2)}
"""Text -> the position of each row's first label."""
ENDS = {"forget": (7, 6, 5), "retain": (7, 7, 6), "refusal": (4, 6, 7)}
"""Text -> where each row's labels end: padding follows."""
FLAT = {"tv": "Total-Variation", "kl": "KL", "js": "Jenson-Shannon", "pearson": "Pearson"}


WIDE = 103
"""A vocabulary in which the mark -100 has a place, counted from the end."""
STEERED = {"c": 2.0, "forget_weight": 0.7, "retain_weight": 1.3}
"""RMU's settings."""


def logits(phase: float, length: int = LENGTH, width: int = VOCABULARY) -> Tensor:
    """(ROWS, length, width) float64 of mixed sizes; no random numbers."""
    place = torch.arange(ROWS * length * width, dtype=torch.float64)
    return (2.5 * torch.sin(1.7 * place + phase) + torch.cos(0.31 * place)).view(ROWS, length, -1)


def labels(text: str, length: int = LENGTH) -> Tensor:
    """(ROWS, length) token ids, -100 in questions and padding."""
    ids = torch.arange(ROWS * length).view(ROWS, length) * 5 % VOCABULARY
    place = torch.arange(length).expand(ROWS, length)
    inside = (place >= torch.tensor(STARTS[text])[:, None]) & (
        place < torch.tensor(ENDS[text])[:, None]
    )
    return ids.masked_fill(~inside, -100)


PHASES = {"forget": 0.3, "retain": 1.1, "refusal": 2.9}
REFERENCE = {"forget": 0.9, "retain": 1.6, "refusal": 0.1}
"""Text -> phase of the model's and of the reference model's logits."""


class Model:
    """Answers a text, told by its name in the place of token ids, with given logits."""

    def __init__(self, given: dict[str, Tensor]):
        self.given = given

    def __call__(self, name, labels=None, attention_mask=None, **_):
        z = torch.cat([self.given[part] for part in name.split("+")])
        flat = z[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return SimpleNamespace(logits=z, loss=torch.nn.functional.cross_entropy(*flat))


class Name(str):
    """A text's name with the one property of a tensor that a peer reads."""

    @property
    def shape(self):
        return torch.Size([ROWS, LENGTH])


def load(path: Path, name: str, **stand_ins: dict) -> ModuleType:
    """A peer's module by path; ``stand_ins`` are modules that it imports and does not use here."""
    for other, content in stand_ins.items():
        module = ModuleType(other)
        module.__dict__.update(content)
        sys.modules[other] = module
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def nothing(*names: str) -> dict:
    """Contents of a stand-in."""
    return dict.fromkeys(names, type("Unused", (), {}))


def iterative(folder: Path, name: str) -> type:
    """The trainer of muse_bench or of its descendant."""
    package = {
        f"{name}": {"__path__": []},
        f"{name}.utils": nothing("load_model_and_tokenizer", "load_model"),
        f"{name}.dataset": nothing("ForgetRetainDataset"),
    }
    return load(folder / "baselines/baselines/iterative.py", f"{name}.iterative", **package)


def graded(loss, given: dict[str, Tensor]) -> dict:
    """Value and gradient by each text's logits."""
    for z in given.values():
        z.requires_grad_()
    value = loss(given)
    grads = torch.autograd.grad(value, list(given.values()), allow_unused=True)
    named = {
        text: [float(f"{g:.12g}") for g in grad.flatten().tolist()]
        for text, grad in zip(given, grads, strict=True)
        if grad is not None
    }
    return {"value": value.item(), "gradient": named}


def of_iterative(trainer: type, kind: str, **fields) -> dict:
    """muse_bench's loss; its texts are whole, so no label is masked there but where given."""

    def loss(given):
        fixed = Model({text: logits(phase) for text, phase in REFERENCE.items()})
        own = SimpleNamespace(loss_type=kind, ref_model=fixed, **fields)
        texts = [
            {"input_ids": text, "labels": labels(text), "attention_mask": labels(text)}
            for text in ("forget", "retain")
        ]
        return trainer.IterativeUnlearner.compute_loss(own, Model(given), texts)

    return graded(loss, {text: logits(PHASES[text]) for text in ("forget", "retain")})


def of_flat(trainer: ModuleType, kind: str, division: str = "", length: int = LENGTH) -> dict:
    """FLAT's loss, on the pairs that its collators give."""
    first, second = {"cl": ("forget", "refusal"), "mismatch": ("refusal", "retain")}[kind]

    def loss(given):
        real = torch.cat
        texts = [(Name(text), labels(text, length), labels(text, length)) for text in given]
        own = SimpleNamespace(loss_type=kind, cl_div=FLAT.get(division, ""))
        try:  # names are joined where that code joins token ids
            torch.cat = lambda parts, dim=0: (
                "+".join(parts) if isinstance(parts[0], str) else real(parts, dim)
            )
            return trainer.CustomTrainerForgetting.compute_loss(own, Model(given), texts)
        finally:
            torch.cat = real

    return graded(loss, {text: logits(PHASES[text], length) for text in (first, second)})


def of_simnpo(trainer: ModuleType, **fields) -> dict:
    """open-unlearning's SimNPO."""

    def loss(given):
        own = SimpleNamespace(gamma=0.125, alpha=1.0, **fields)
        own.compute_retain_loss = lambda model, retain_inputs: model(**retain_inputs).loss
        texts = {
            text: {"input_ids": text, "labels": labels(text), "attention_mask": None}
            for text in given
        }
        model = Model(given)
        answer = lambda input_ids, **rest: model(input_ids, **rest)  # noqa: E731
        return trainer.SimNPO.compute_loss(own, answer, texts)

    return graded(loss, {text: logits(PHASES[text]) for text in ("forget", "retain")})


def of_undial(peer: ModuleType, strength: float) -> dict:
    """open-unlearning's UNDIAL, where every position counts."""
    fixed = Model({"forget": logits(REFERENCE["forget"], width=WIDE)})

    def loss(given):
        texts = {"input_ids": "forget", "labels": labels("forget")}
        model = Model(given)
        models = [
            lambda input_ids, labels, model=model: SimpleNamespace(logits=model.given[input_ids])
            for model in (model, fixed)
        ]
        return peer.compute_undial_loss(*models, texts, strength)[0]

    return graded(loss, {"forget": logits(PHASES["forget"], width=WIDE)})


def of_forget(compute, **fields) -> dict:
    """open-unlearning's loss of forget texts alone."""

    def loss(given):
        texts = {"input_ids": "forget", "labels": labels("forget")}
        return compute(lambda input_ids, labels: Model(given)(input_ids, labels), texts, **fields)[
            0
        ]

    return graded(loss, {"forget": logits(PHASES["forget"])})


def of_dpo(peer: ModuleType, beta: float) -> dict:
    """open-unlearning's DPO: a refusal before the true answer, relative to a frozen model."""
    fixed = Model({text: logits(phase) for text, phase in REFERENCE.items()})
    texts = [{"input_ids": text, "labels": labels(text)} for text in ("refusal", "forget")]

    def loss(given):
        models = [
            lambda input_ids, labels, model=model: model(input_ids, labels)
            for model in (Model(given), fixed)
        ]
        return peer.compute_dpo_loss(*models, *texts, beta)[0]

    return graded(loss, {text: logits(PHASES[text]) for text in ("forget", "refusal")})


def of_hinge(trainer: ModuleType) -> dict:
    """LoKU's inverted hinge with its retain term."""

    def loss(given):
        texts = [(text, labels(text), None) for text in ("forget", "retain")]
        own = SimpleNamespace(loss_type="IHL")
        return trainer.CustomTrainerForgetting.compute_loss(own, Model(given), texts)

    return graded(loss, {text: logits(PHASES[text]) for text in ("forget", "retain")})


class Layered(torch.nn.Module):
    """A model whose hidden states, after its one layer, are given."""

    def __init__(self, given: dict[str, Tensor]):
        super().__init__()
        self.layer, self.given = torch.nn.Identity(), given

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.layer(self.given[input_ids]))


def direction() -> Tensor:
    """(VOCABULARY,) of length 1: where hidden states are steered to."""
    place = torch.arange(VOCABULARY, dtype=torch.float64)
    return place.sin().abs() / place.sin().norm()


def of_rmu(peer: ModuleType) -> dict:
    """open-unlearning's RMU; states stand for the layer's output."""

    def loss(given):
        own = peer.RMU.__new__(peer.RMU)
        models = Layered(given), Layered({text: logits(p) for text, p in REFERENCE.items()})
        own.ref_model = models[1]
        own.model_module, own.ref_module = (model.layer for model in models)
        own.gamma, own.alpha = STEERED["forget_weight"], STEERED["retain_weight"]
        own.retain_loss_type = "EMBED_DIFF"
        own.control_vec = STEERED["c"] * direction().view(1, 1, -1)
        texts = {
            text: {"input_ids": text, "labels": labels(text), "attention_mask": None}
            for text in given
        }
        return own.compute_loss(models[0], texts)

    return graded(loss, {text: logits(PHASES[text]) for text in ("forget", "retain")})


def of_composite(peer: ModuleType, a: float) -> dict:
    """muse_bench's two models at inference."""

    class Whole(peer.WHPModelForCausalLM):
        def __init__(self, baseline, reinforced):
            torch.nn.Module.__init__(self)
            self.baseline, self.reinforced, self.alpha = baseline, reinforced, a

    answer = lambda z: lambda **_: SimpleNamespace(logits=z)  # noqa: E731
    pair = [torch.nn.Identity(), torch.nn.Identity()]
    for module, phase in zip(pair, (0.3, 0.9), strict=True):
        module.forward = answer(logits(phase))
    joined = Whole(*pair)(input_ids=None).logits
    return {"logits": [float(f"{z:.12g}") for z in joined.flatten().tolist()]}


def of_task_vector(peer: ModuleType, a: float) -> dict:
    """muse_bench's extrapolation of a state dict."""
    start, tuned = {"w": logits(0.3)}, {"w": logits(0.9)}
    vector = -peer.TaskVector(pretrained_state_dict=start, finetuned_state_dict=tuned)
    model = SimpleNamespace(state_dict=lambda: start)
    moved = vector.apply_to(model, scaling_coef=a)["w"]
    return {"weights": [float(f"{w:.12g}") for w in moved.flatten().tolist()]}


def collect(folder: Path) -> dict:
    """Every case, with float64 for the constants that a peer makes too."""
    torch.set_default_dtype(torch.float64)
    muse = iterative(folder / "muse_bench", "muse_baselines")
    simple = iterative(folder / "Unlearn-Simple/MUSE", "simple_baselines")
    stand_ins = {
        "deepspeed": {},
        "evaluate_util": nothing("get_dataloader", "get_all_evals"),
        "data_module": nothing("get_batch_loss"),
        "utils": nothing(
            "merge_dicts",
            "interleave_eval_result_dict",
            "get_forget_quality",
            "get_model_utility",
        ),
    }
    flat = load(folder / "FLAT/dataloader.py", "flat_dataloader", **stand_ins)
    ours = {"trainer": {"__path__": []}, "trainer.unlearn": {"__path__": []}}
    ours["trainer.unlearn.grad_diff"] = nothing("GradDiff")
    ours["deepspeed"] = nothing("DeepSpeedEngine")
    source = folder / "open-unlearning/src/trainer"
    sys.modules.update({name: ModuleType(name) for name in ours})
    utils = load(source / "utils.py", "trainer.utils", **ours)
    simnpo = load(source / "unlearn/simnpo.py", "trainer.unlearn.simnpo")
    cases = {
        f"muse_bench {kind}": of_iterative(muse, kind, beta=0.1)
        for kind in ("ga_gdr", "npo", "npo_gdr", "npo_klr")
    }
    weights = {"beta": 0.7, "gamma": 0.4, "npo_coeff": 0.125, "coeff": 1.0}
    for kind in ("simnpo", "simnpo_gdr"):
        cases[f"unlearn_simple {kind}"] = of_iterative(simple, kind, **weights)
    for division in FLAT:
        cases[f"flat {division}"] = of_flat(flat, "cl", division)
        cases[f"flat {division} padded"] = of_flat(flat, "cl", division, length=10)
    cases["flat mismatch"] = of_flat(flat, "mismatch")
    cases["openunlearning simnpo"] = of_simnpo(simnpo, beta=4.5, delta=0.2)
    cases["openunlearning undial"] = of_undial(utils, 10.0)
    cases["openunlearning rmu"] = of_rmu(load(source / "unlearn/rmu.py", "trainer.unlearn.rmu"))
    cases["openunlearning dpo"] = of_dpo(utils, 0.1)
    cases["openunlearning wga"] = of_forget(utils.compute_wga_loss, beta=1.0)
    cases["openunlearning satimp"] = of_forget(utils.compute_satimp_loss, beta1=5.0, beta2=1.0)
    ceu = load(
        source / "unlearn/ceu.py",
        "trainer.unlearn.ceu",
        **{"trainer.unlearn.base": nothing("UnlearnTrainer")},
    )
    cases["openunlearning ceu"] = of_forget(ceu.compute_batch_ceu, ignore_first_n_answer_tokens=1)
    loku = load(folder / "loku/TOFU/dataloader.py", "loku_dataloader", **stand_ins)
    cases["loku ihl"] = of_hinge(loku)
    whp = load(folder / "muse_bench/baselines/baselines/whos_harry_potter.py", "muse_whp")
    cases["muse_bench whp"] = of_composite(whp, 1.3)
    vector = load(folder / "muse_bench/baselines/baselines/task_vector.py", "muse_vector")
    cases["muse_bench task_vector"] = of_task_vector(vector, 5.0)
    return cases


if __name__ == "__main__":
    found = collect(Path(sys.argv[1]))
    (HERE / f"{NAME}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
