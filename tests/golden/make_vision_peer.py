"""How ``vision_peer.json`` was made; see ``vision_peer.md``.

``FOLDER`` holds clones of the peers under their repositories' names.  Their own functions run, on
the CPU and in float64, on numbers that a formula gives; what they import and do not use is replaced
by empty modules.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
NAME = "vision_peer"
ROWS, CLASSES, SIDE = 6, 5, 3
LABELS = torch.tensor([0, 3, 1, 4, 2, 3])
FORGOTTEN = torch.tensor([1, 0, 0, 1, 1, 0])
"""Rows of the forget set."""
STUDENT, COMPETENT, INCOMPETENT = 0.3, 0.9, 1.7
"""Phases of the logits of three models."""
TEMPERATURE, GAMMA, ALPHA = 4.0, 0.99, 0.3
BOUND, DECAY, NOISE_STEPS = 0.3, 0.1, 7
SHAPES = {"matrix": (4, 3), "vector": (4,), "head": (CLASSES, 4), "head_bias": (CLASSES,)}
GONE = 1


def values(phase: float, *shape: int) -> Tensor:
    """Float64 numbers of mixed sizes; nothing random."""
    place = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (2.5 * torch.sin(1.7 * place + phase) + torch.cos(0.31 * place)).view(shape)


def logits(phase: float) -> Tensor:
    """(ROWS, CLASSES)."""
    return values(phase, ROWS, CLASSES)


def images() -> Tensor:
    """(ROWS, 1, SIDE, SIDE) in [0, 1], multiples of 1/255 as a peer rounds to."""
    return (255 * torch.sigmoid(values(0.5, ROWS, 1, SIDE, SIDE))).round() / 255


def classifier() -> nn.Module:
    """Pixels -> logits, linear."""
    layer = nn.Linear(SIDE**2, CLASSES).double()
    with torch.no_grad():
        layer.weight.copy_(values(2.2, CLASSES, SIDE**2))
        layer.bias.copy_(values(0.7, CLASSES))
    return nn.Sequential(nn.Flatten(), layer)


def fishers() -> dict[str, Tensor]:
    """Diagonals of Fisher informations, from none to large."""
    return {name: values(0.4, *shape).abs().pow(9) for name, shape in SHAPES.items()}


def load(path: Path, name: str, **stand_ins: dict) -> ModuleType:
    """A peer's module by path; ``stand_ins`` are modules that it does not need here."""
    for other, content in stand_ins.items():
        module = ModuleType(other)
        module.__dict__.update(content)
        sys.modules[other] = module
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def numbers(tensor: Tensor) -> list[float]:
    """As JSON holds them."""
    return [float(f"{value:.12g}") for value in tensor.flatten().tolist()]


def graded(loss) -> dict:
    """Value, and gradient by the student's logits."""
    given = logits(STUDENT).requires_grad_()
    value = loss(given)
    (gradient,) = torch.autograd.grad(value, given)
    return {"value": value.item(), "gradient": numbers(gradient)}


class Given(nn.Module):
    """Answers any input with its own logits, which are its parameter."""

    def __init__(self, phase: float, rows: Tensor):
        super().__init__()
        self.logits = nn.Parameter(logits(phase)[rows])

    def forward(self, x):
        return self.logits


def of_scrub(folder: Path, split: str, rows: Tensor) -> dict:
    """Gradient that one step of SCRUB's own loop leaves in the student's logits."""
    package = {"scrub": {"__path__": []}, "scrub.util": dict.fromkeys(("accuracy", "param_dist"))}
    meter = lambda: SimpleNamespace(update=lambda *_: None, avg=0.0)  # noqa: E731
    package["scrub.util"]["AverageMeter"] = meter
    helper = folder / "SCRUB/thirdparty/repdistiller/helper/loops.py"
    loops = load(helper, "scrub.loops", **package)
    kd = load(folder / "SCRUB/thirdparty/repdistiller/distiller_zoo/KD.py", "scrub_kd")
    student, teacher = Given(STUDENT, rows), Given(COMPETENT, rows)
    still = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)
    options = SimpleNamespace(distill="kd", gamma=GAMMA, alpha=ALPHA, beta=0.0)
    criteria = [nn.CrossEntropyLoss(), kd.DistillKL(TEMPERATURE), None]
    data = [(torch.zeros(len(rows), 1), LABELS[rows])]
    loops.train_distill(
        0, data, nn.ModuleList([student, teacher]), None, criteria, still, options, split, True
    )
    return {"gradient": numbers(student.logits.grad)}


def of_saliency(folder: Path) -> dict:
    """Masks of SalUn's own script, by the share of weights that may move."""
    empty = {other: {} for other in ("arg_parser", "unlearn", "utils")}
    path = folder / "Unlearn-Saliency/Classification/generate_mask.py"
    script = load(path, "salun_mask", **empty)
    torch.Tensor.cuda = lambda self: self
    model = classifier().float()
    loader = [(images()[:3].float(), LABELS[:3]), (images()[3:].float(), LABELS[3:])]
    with tempfile.TemporaryDirectory() as save:
        options = SimpleNamespace(unlearn_lr=0.1, momentum=0.0, weight_decay=0.0, save_dir=save)
        script.save_gradient_ratio({"forget": loader}, model, nn.CrossEntropyLoss(), options)
        masks = {share: torch.load(Path(save) / f"with_{share}.pt") for share in (0.1, 0.5, 0.8)}
    return {
        str(share): {name: mask.flatten().tolist() for name, mask in of.items()}
        for share, of in masks.items()
    }


def of_fisher(folder: Path) -> dict:
    """Variances of SalUn's own function, for a forgotten class."""
    path = folder / "Unlearn-Saliency/Classification/unlearn/fisher.py"
    peer = load(path, "salun_fisher", tqdm={"tqdm": None})
    options = SimpleNamespace(
        num_classes=CLASSES,
        alpha=3e-6,
        num_indexes_to_replace=4500,
        dataset="cifar10",
        class_to_replace=GONE,
    )
    made = {}
    for name, fisher in fishers().items():
        parameter = nn.Parameter(torch.ones_like(fisher))
        parameter.data0, parameter.grad2_acc = parameter.data.clone(), fisher
        made[name] = numbers(peer.get_mean_var(parameter, options)[1])
    return made


def collect(folder: Path) -> dict:
    """Every case."""
    torch.set_default_dtype(torch.float64)
    path = folder / "bad-teaching-unlearning/unlearn.py"
    teaching = load(path, "bad_teaching", dataset={"UnLearningData": None}, utils={})
    sfron = load(
        folder / "Unified-Unlearning-w-Remain-Geometry/Classification/unlearn/sfron.py",
        "remain.sfron",
        **{
            "remain": {"__path__": []},
            "remain.unlearn_method": {"UnlearnMethod": object},
            "trainer": {"validate": None},
        },
    )
    weighted = sfron.AdaptiveLoss(nn.CrossEntropyLoss(reduction="none"), lambd=0.5)
    attack = load(folder / "Boundary-Unlearning-Code/adv_generator.py", "boundary_attack")
    model, device = classifier(), torch.device("cpu")
    predicted = model(images()).argmax(1)
    fgsm = attack.FGSM(model, BOUND, norm=False, device=device)
    noise = teaching.UNSIR_noise(4, 1, SIDE, SIDE)
    noise.noise.data.copy_(values(1.3, 4, 1, SIDE, SIDE))
    teaching.UNSIR_noise_train(noise, model, 2, NOISE_STEPS, 4, "cpu")
    everyone, forgotten = torch.arange(ROWS), FORGOTTEN.nonzero().squeeze(1)
    return {
        "bad_teacher": graded(
            lambda given: teaching.UnlearnerLoss(
                given, FORGOTTEN, logits(COMPETENT), logits(INCOMPETENT), 2.0
            )
        ),
        "scrub maximize": of_scrub(folder, "maximize", forgotten),
        "scrub minimize": of_scrub(folder, "minimize", everyone),
        "sfron": graded(lambda given: weighted(given, LABELS)),
        "boundary": model(fgsm.perturb(images(), predicted)).argmax(1).tolist(),
        "unsir": numbers(noise.noise),
        "fisher": of_fisher(folder),
        "salun": of_saliency(folder),
    }


if __name__ == "__main__":
    cases = collect(Path(sys.argv[1]))
    (HERE / f"{NAME}.json").write_text(json.dumps(cases) + "\n", encoding="utf-8")
