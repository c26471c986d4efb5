"""The config of causal language models, and what the arm's other configs are made of.

It lives apart from the code that uses it because that code needs torch, and listing, planning and
reporting must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from stable_forgetting.common.base.grown import Grown
from stable_forgetting.common.base.hub import MARK, is_repository, parsed
from stable_forgetting.common.base.numbers import Count, Depth

Style = Literal["clean", "openunlearning", "tofu"]
Family = Literal["question_answer", "llama2_chat", "llama3_chat", "chat"]
_TINY_DEFAULTS: dict[str, Any] = {
    "kind": "gpt_neo",
    "dim": 128,
    "depth": 2,
    "heads": 4,
    "context": 512,
    "tokenizer": 4000,
}


class CausalModelConfig(Grown):
    """A causal language model: any of Hugging Face's, or a tiny one from scratch.

    Attributes:
        name: ``tiny``, a hub id such as ``microsoft/phi-1_5``, or a folder with config.json and
            safetensors, or of a PEFT adapter, which is merged into its model.  ``package:NAME`` is
            what an installed package brings, with the vocabulary of the data's text
            (:mod:`language.models.packages`).  Pickled weights and remote code are never loaded.
        revision: Commit or tag of the hub id ``name``.
        kind: Family of a tiny model: ``gpt_neo``, ``phi``, ``llama``, or another that has one in
            :data:`language.models.families.FAMILIES`.  Embeddings are tied.
        dim: Hidden width of a tiny model.
        depth: Blocks of a tiny model.
        heads: Attention heads of a block of a tiny model.
        context: Tokens of the longest sequence of a tiny model.
        tokenizer: A number trains a byte-level BPE of that size on the data's own text; else a
            folder or hub id.  The model's own when absent; tiny: 4000.
        template: How a question becomes a prompt: ``Question: .. Answer: ..`` (GPT-Neo, Phi,
            LLaMA base), ``[INST] .. [/INST]`` (LLaMA-2-chat), LLaMA-3's chat headers with a system
            message, or the tokenizer's own ``chat`` format.
        style: ``clean`` keeps the first answer token and one end token in the labels; the other
            two reproduce published code (:mod:`language.data.templates`).
        dtype: Of the weights.
        attention: Implementation that transformers should use; its own choice when absent.
        gradient_checkpointing: Recompute activations in the backward pass.
        device_map: Of ``from_pretrained``: ``auto`` spreads one model over several devices.
        quantised: Pack the weights of the blocks by bitsandbytes: in 4 bits (``nf4``, as in QLoRA,
            arXiv 2305.14314) or ``int8``.  Rows need an adapter, with ``mode: split`` or ``auto``.
        original: Published checkpoint (id or folder) to take as Original instead of training it.
        retrain: Scenario label -> published checkpoint to take as Retrain.
    """

    later = {"quantised": None}
    name: str = "tiny"
    revision: str | None = None
    kind: str | None = None
    dim: Count | None = None
    depth: Depth | None = None
    heads: Count | None = None
    context: Count | None = None
    tokenizer: Annotated[int, Field(ge=260)] | str | None = None
    template: Family = "question_answer"
    style: Style = "clean"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    gradient_checkpointing: bool = False
    device_map: str | Mapping[str, int | str] | None = None
    quantised: Literal["nf4", "int8"] | None = None
    original: str | None = None
    retrain: Mapping[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_tiny(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        name = data.get("name", "tiny")
        if isinstance(name, str) and name.startswith(MARK) and is_repository(name):
            name, revision = parsed(name)
            data = {**({"revision": revision} if revision else {}), **data, "name": name}
        return {**_TINY_DEFAULTS, **data} if name == "tiny" else data

    @model_validator(mode="after")
    def _consistent(self) -> CausalModelConfig:
        if self.quantised and not self.original:
            raise ValueError("quantised: packed weights are not trained whole: name model.original")
        if self.name != "tiny":
            for field in _TINY_DEFAULTS.keys() - {"tokenizer"}:
                if getattr(self, field) is not None:
                    raise ValueError(f"{field}: only for name: tiny; {self.name} has its own")
            return self
        missing = [field for field in _TINY_DEFAULTS if getattr(self, field) is None]
        if missing:
            raise ValueError(f"{missing[0]}: name: tiny needs a value here")
        assert self.dim and self.heads
        if self.dim % (2 * self.heads):
            raise ValueError("dim must be a multiple of 2 * heads")
        if self.original or self.retrain or self.revision or self.device_map:
            raise ValueError("original, retrain, revision and device_map are not for name: tiny")
        return self
