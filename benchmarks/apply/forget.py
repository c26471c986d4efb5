"""``forget``: the Python door to unlearning, and what ``unlearn apply`` calls.

Samples that are given in memory, to forget, to retain or to test on, are one of:

* pairs of a float tensor (C, H, W), as the model takes it, and an int label;
* pairs of an image of PIL and a label, for a timm model, which says how it reads images;
* mappings with ``image`` and ``label``, as in a data set of the hub;
* for a causal language model: texts, pairs of a question and its answer, or mappings with
  ``question`` and ``answer``, ``text``, ``prompt`` and ``completion``, or ``messages``.

A path is a folder CLASS/x.png, or a JSON-lines file of such mappings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from stable_forgetting.benchmarks.apply.result import Result
from stable_forgetting.benchmarks.apply.work import apply
from stable_forgetting.common.base.config import listed
from stable_forgetting.common.base.registry import load_plugins
from stable_forgetting.common.base.seeding import torch_as_it_was
from stable_forgetting.common.protocol.given import Application

if TYPE_CHECKING:
    from torch import nn

    from stable_forgetting.common.train.protocols import Progress


class Reading(TypedDict, total=False):
    """How a model and its samples are read.

    Attributes:
        tokenizer: Of a language model in memory; else that of the folder or hub id that the model
            came from.
        template: How a question is put to a language model; else the chat template of its
            tokenizer, where it has one.
        max_length: Tokens of the longest row of text; longer texts are divided.
        arch: timm's name, for a bare file of image weights.
        image_size: Side in px of the images that a bare file was trained on, where its weights do
            not tell it.
    """

    tokenizer: Any
    template: str | None
    max_length: int | None
    arch: str | None
    image_size: int | None


class Further(Reading, total=False):
    """What is seldom needed.

    Attributes:
        preset: A named group of settings of the method.
        goal: What the accuracy (images) or probability (text) on forget data should come to, in
            percent.
        audits: ``relearn`` measures how soon fine-tuning brings the forgotten samples back.
        anyway: Go on where the model is right on too few images of a part.
        threads: Torch threads; else they are left as they are.
        progress: Called with step, steps in all and loss after every step.
        plugins: Python files that register methods.
    """

    preset: str | None
    goal: float | None
    audits: Sequence[str]
    anyway: bool
    threads: int | None
    progress: Progress | None
    plugins: Sequence[str]


def forget(
    model: nn.Module | str | Path,
    forget: Any,
    retain: Any = None,
    method: str | Sequence[str] = "gd_sine",
    *,
    test: Any = None,
    params: Mapping[str, Any] | Sequence[str] = (),
    seed: int = 0,
    out: str | Path | None = None,
    device: str | None = None,
    **more: Unpack[Further],
) -> Result:
    """Makes a copy of a trained model forget some of its samples; the given one stays as it is.

    Args:
        model: An image classifier, a causal language model of transformers, or the folder or hub
            id of one.
        forget: What to forget: a map-style data set (of torch, of ``datasets``, or a list), or a
            path; see :mod:`benchmarks.apply.forget`.
        retain: What to keep, in the same form; most methods read it.
        method: One of ``unlearn show methods``.  Of several, one is chosen on retained samples that
            are held out.
        test: What the model never saw, in the same form; measured, never trained on.
        params: Settings of the method, such as ``{"steps": 60, "adapter": {"rank": 8}}``; or
            texts such as ``adapter.rank=8``.
        seed: Of the run.
        out: A new folder to write into; None keeps everything in memory.
        device: Of torch; None takes that of a model in memory, else the first accelerator.
        **more: See :class:`Further`.

    Returns:
        The new model and what was measured before and after.  A classifier in half precision comes
        back in float32, with values that its own type holds, and is saved in its own type.

    Raises:
        UserError: Something that is given can be mended.

    Example:
        >>> result = forget(model, sevens, others, "gd_sine", params={"steps": 2}, anyway=True)
        >>> sorted(result.after["forget"])
        ['accuracy', 'images', 'loss']
        >>> result.save("forgotten").name
        'forgotten'
    """
    progress, plugins = more.pop("progress", None), listed(more.pop("plugins", ()))
    samples = {"forget": forget, "retain": retain, "test": test}
    application = Application(
        model=_path(model),
        **{role: _path(given) for role, given in samples.items()},
        method=method if isinstance(method, str) else ",".join(method),
        out=None if out is None else Path(out),
        params=params if isinstance(params, Mapping) else tuple(listed(params)),
        seed=seed,
        device=device or place_of(model),
        **_settings(more),
    )
    load_plugins(plugins)
    with left_as_it_is(model), torch_as_it_was():
        return apply(application, progress=progress)


def _settings(more: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an application: what says how a model is read lies under ``options``."""
    unknown = more.keys() - Further.__annotations__.keys()
    if unknown:
        raise TypeError(f"forget() got an unexpected keyword argument '{min(unknown)}'")
    reading = Reading.__annotations__
    options = {name: v for name, v in more.items() if name in reading and v is not None}
    fields = {name: v for name, v in more.items() if name not in reading}
    audits = tuple(listed(fields.get("audits", ())))
    return {"threads": None, **fields, "audits": audits, "options": options}


def _path(given: Any) -> Any:
    return Path(given) if isinstance(given, str) else given


@contextmanager
def left_as_it_is(model: Any) -> Iterator[None]:
    """A model in memory is measured in eval mode; its modes and its device are put back."""
    if not hasattr(model, "modules"):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    place = place_of(model)
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        if place_of(model) != place:
            model.to(place)


def place_of(model: Any) -> str:
    """Where a model lies; ``auto`` for one that is still to be read."""
    first = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    return "auto" if first is None else str(first.device)
