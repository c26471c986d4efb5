"""Make your own model forget some of your samples, through bounded adapters.

``forget`` is all that you need: it takes any ``nn.Module`` that classifies, such as one of timm,
and a torch ``Dataset``.  The rest trains a small ViT on scikit-learn's digits to have one.
Run: python examples/own_model.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, TensorDataset

from stable_forgetting.common import (
    AdapterConfig,
    CrossEntropy,
    DatasetSource,
    FitConfig,
    Loader,
    attach,
    detach,
    fit,
    gradient_difference,
)


def forget(model, dataset: Dataset, forgotten, retained, *, lr=3e-3, steps=60):
    """Unlearns the samples ``forgotten`` in place, and holds on to the samples ``retained``."""
    order = torch.Generator().manual_seed(0)
    adapter = AdapterConfig(phi="sine", omega=100.0)  # dW = (alpha / r) sin(omega A B^T)
    attach(model, ["blocks.*.mlp.fc*"], adapter, order)
    source = DatasetSource(dataset)
    loaders = {
        "retain": Loader(source, retained, 32, order),
        "forget": Loader(source, forgotten, 32, order),
    }
    objective = gradient_difference(retain_weight=1.0, forget_weight=0.1)
    # lr is that of a plain weight: fit divides it by the adapter's slope (here omega = 100)
    fit(model, objective, loaders, FitConfig(steps=steps, lr=lr), forward=logits, seed=0)
    return detach(model)  # plain nn.Linear again, under the old names


def logits(model, batch):
    """What the model says of a batch."""
    return model(batch.inputs["x"])


def accuracy(model, dataset: TensorDataset, indices):
    """Percent."""
    images, labels = dataset[indices]
    with torch.no_grad():
        return 100 * (model.eval()(images).argmax(1) == labels).float().mean().item()


def example():
    """(model, dataset, forgotten, retained): digits learnt by a small ViT; the sevens must go."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[:600, None] / 16).float()
    dataset = TensorDataset(images, torch.tensor(digits.target[:600]))
    size = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **size)
    everything = torch.arange(600)
    loaders = {"all": Loader(DatasetSource(dataset), everything, 64, torch.Generator())}
    config = FitConfig(epochs=25, batch_size=64, lr=3e-3)
    fit(model, CrossEntropy("all"), loaders, config, forward=logits, seed=0)
    sevens = dataset.tensors[1] == 7
    return model, dataset, everything[sevens], everything[~sevens]


if __name__ == "__main__":
    model, dataset, forgotten, retained = example()
    for when in ("before", "after"):
        parts = {"forget": forgotten, "retain": retained}
        shown = {name: f"{accuracy(model, dataset, ids):.1f} %" for name, ids in parts.items()}
        print(when, shown)
        if when == "before":
            forget(model, dataset, forgotten, retained)
