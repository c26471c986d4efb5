"""Where adapters go in an architecture: read from the names and shapes of its linear layers.

No torch here: a model, a config's closed form and a stored model are read alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from stable_forgetting.common.protocol.sizes import Shape
from stable_forgetting.language.models.families import CausalFamily, family_of

Linear = Mapping[str, "Shape"]
Group = dict[str, "Shape"]
"""Linear layers of one module: last part of the name -> (outputs, inputs)."""


def linear_layers(model: Any) -> dict[str, Shape]:
    """Dotted name -> (outputs, inputs) of a model's linear layers."""
    from torch import nn

    return {
        name: (layer.out_features, layer.in_features)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    }


def family_in(model: Any) -> CausalFamily:
    """The family of a model, its layers read from its modules where the table names none."""
    return completed(family_of(model.config.model_type), linear_layers(model))


def completed(family: CausalFamily, linear: Linear) -> CausalFamily:
    """A family whose table row names no layers, with those that its blocks have.

    The attention is told by its name.  The MLP is told by its shapes: one layer leads back to the
    width of the others' inputs.  Both must be found in every block, so that no adapter leaves
    blocks out (as it would where some blocks have experts).

    Args:
        family: Of the table.
        linear: Dotted name -> (outputs, inputs) of the linear layers.
    """
    if family.mlp or not linear:
        return family
    stack, blocks = _main_stack(linear)
    return replace(
        family,
        mlp=_in_every_block(stack, blocks, _is_mlp),
        attention=_in_every_block(stack, blocks, _is_attention),
        layers=tuple(dict.fromkeys(f"*.{name}" for block in blocks for name in _names(block))),
    )


def _main_stack(linear: Linear) -> tuple[str, list[dict[str, Group]]]:
    """The blocks of the stack with the most weights: module in the block -> its linear layers."""
    stacks: dict[str, dict[str, dict[str, Group]]] = {}
    weights: dict[str, int] = {}
    for name, shape in linear.items():
        parts = name.split(".")
        place = next((n for n, part in enumerate(parts) if part.isdigit()), None)
        if place is None:
            continue
        stack, module = ".".join(parts[:place]), ".".join(parts[place + 1 : -1])
        block = stacks.setdefault(stack, {}).setdefault(parts[place], {})
        block.setdefault(module, {})[parts[-1]] = shape
        weights[stack] = weights.get(stack, 0) + shape[0] * shape[1]
    largest = max(weights, key=weights.__getitem__, default="")
    return largest, list(stacks.get(largest, {}).values())


def _in_every_block(
    stack: str, blocks: list[dict[str, Group]], fits: Callable[[str, Group], bool]
) -> tuple[str, ...]:
    """Patterns of the layers of the modules that fit; none where a block has no such module."""
    found: dict[str, None] = {}
    for block in blocks:
        own = {module: group for module, group in block.items() if fits(module, group)}
        if not own:
            return ()
        found |= dict.fromkeys(f"*{stack}.*.{name}" for name in _names(own))
    return tuple(found)


def _names(block: Mapping[str, Group]) -> Iterator[str]:
    for module, group in block.items():
        yield from (f"{module}.{leaf}".lstrip(".") for leaf in group)


def _is_attention(module: str, group: Group) -> bool:
    own = module.rpartition(".")[2]
    return "attn" in own or "attention" in own


def _is_mlp(module: str, group: Group) -> bool:
    """Whether one layer (w, m) goes back and all others are (m, w), or (2 m, w) where fused."""
    if _is_attention(module, group) or "." in module:
        return False
    for leaf, (width, inner) in group.items():
        others = [shape for name, shape in group.items() if name != leaf]
        if others and all(shape in ((inner, width), (2 * inner, width)) for shape in others):
            return True
    return False
