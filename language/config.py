"""The config of causal language models, and what the arm's other configs are made of.

It lives apart from the code that uses it because that code needs torch, and listing, planning and
reporting must not wait for torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator

from stable_forgetting.common.base.config import Strict, did_you_mean
from stable_forgetting.common.base.numbers import Count, Depth

Style = Literal["clean", "openunlearning", "tofu"]
Family = Literal["question_answer", "llama2_chat", "llama3_chat"]
_TINY_DEFAULTS: dict[str, Any] = {
    "kind": "gpt_neo",
    "dim": 128,
    "depth": 2,
    "heads": 4,
    "context": 512,
    "tokenizer": 4000,
}


class Variant(Strict):
    """A config of several kinds: one field tells the kind, and every kind is a subclass.

    A key of another kind is an error that names the kinds which have it, unless its value is that
    of :attr:`absent` (null erases a key of the suite that is extended).
    """

    tag: ClassVar[str] = "name"
    """The field that tells the kind; its default is that of the class."""
    absent: ClassVar[Mapping[str, Any]] = {}
    """Keys that the hashed form always has, with what stands there for a kind without them."""
    later: ClassVar[tuple[str, ...]] = ()
    """Fields that the hashed form has only where they differ from their defaults."""

    @classmethod
    @abstractmethod
    def kinds(cls) -> Mapping[str, type[Variant]]:
        """Kind -> subclass."""

    @classmethod
    def of(cls, **fields: Any) -> Any:
        """The config of the kind that the fields tell."""
        return cls.model_validate(fields)

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, data: Any, handler: Any) -> Any:
        if not isinstance(data, Mapping):
            return handler(data)
        kinds, kind = cls.kinds(), data.get(cls.tag, cls.model_fields[cls.tag].default)
        if kind not in kinds:
            raise ValueError(f"{cls.tag}: unknown '{kind}'{did_you_mean(str(kind), [*kinds])}")
        if not issubclass(cls, kinds[kind]):
            return kinds[kind].model_validate(data)
        return handler({key: data[key] for key in data if cls._is_own(key, data[key])})

    @classmethod
    def _is_own(cls, key: str, value: Any) -> bool:
        if key in cls.model_fields:
            return True
        if value is None or (key in cls.absent and cls.absent[key] == value):
            return False
        owners = [name for name, kind in cls.kinds().items() if key in kind.model_fields]
        if owners:
            raise ValueError(f"{key} is only for {cls.tag}: {' and '.join(owners)}; leave it out")
        raise ValueError(f"{key}: unknown key{did_you_mean(key, [*cls.model_fields])}")

    @model_serializer(mode="wrap")
    def _hashed_form(self, handler: Any) -> dict[str, Any]:
        fields = type(self).model_fields
        same = {name for name in self.later if getattr(self, name) == fields[name].default}
        own = {name: value for name, value in handler(self).items() if name not in same}
        return {**self.absent, **own}


class CausalModelConfig(Strict):
    """A causal language model: any of Hugging Face's, or a tiny one from scratch.

    Attributes:
        name: ``tiny``, a hub id such as ``microsoft/phi-1_5``, or a folder with config.json and
            safetensors.  Pickled weights and remote code are never loaded.
        revision: Commit or tag of a hub id.
        kind: Family of a tiny model: ``gpt_neo``, ``phi``, ``llama``, or another that has one in
            :data:`language.models.families.FAMILIES`.  Embeddings are tied.
        dim: Hidden width of a tiny model.
        depth: Blocks of a tiny model.
        heads: Attention heads of a block of a tiny model.
        context: Tokens of the longest sequence of a tiny model.
        tokenizer: A number trains a byte-level BPE of that size on the data's own text; else a
            folder or hub id.  The model's own when absent; tiny: 4000.
        template: How a question becomes a prompt: ``Question: .. Answer: ..`` (GPT-Neo, Phi,
            LLaMA base), ``[INST] .. [/INST]`` (LLaMA-2-chat), or LLaMA-3's chat headers.
        style: ``clean`` keeps the first answer token and one end token in the labels; the other
            two reproduce published code (:mod:`language.data.templates`).
        dtype: Of the weights.
        attention: Implementation that transformers should use; its own choice when absent.
        gradient_checkpointing: Recompute activations in the backward pass.
        device_map: Of ``from_pretrained``: ``auto`` spreads one model over several devices.
        original: Published checkpoint (id or folder) to take as Original instead of training it.
        retrain: Scenario label -> published checkpoint to take as Retrain.
    """

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
    original: str | None = None
    retrain: Mapping[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_tiny(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("name", "tiny") == "tiny":
            return {**_TINY_DEFAULTS, **data}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> CausalModelConfig:
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
