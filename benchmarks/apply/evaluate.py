"""``evaluate``: one model measured by a probe or by a benchmark, without a Retrain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.apply.forget import left_as_it_is, place_of
from stable_forgetting.benchmarks.report import html, markdown
from stable_forgetting.benchmarks.report.cells import MISSING, number
from stable_forgetting.benchmarks.report.section import Column, Section, table
from stable_forgetting.benchmarks.suite.resolve import load_suite
from stable_forgetting.benchmarks.suite.suite import close_to, is_file, suite_names
from stable_forgetting.common.base.config import apply_overrides, canonical, listed, merge, validate
from stable_forgetting.common.base.errors import CheckpointError, ConfigError
from stable_forgetting.common.base.registry import BENCHMARKS, load_plugins
from stable_forgetting.common.protocol.benchmark import Benchmark, Runtime, pick_device
from stable_forgetting.common.protocol.probe import PROBES, Probe, make_probe
from stable_forgetting.language.apply.checkpoint import CausalCheckpoint, read_causal
from stable_forgetting.language.apply.memory import GivenCausal
from stable_forgetting.language.benchmark import CausalBenchmark
from stable_forgetting.language.probes.base import ProbedModel, TextProbe, as_probed
from stable_forgetting.vision.apply.checkpoint import is_timm, read_checkpoint
from stable_forgetting.vision.apply.preprocessing import Preprocessing
from stable_forgetting.vision.benchmark import VisionBenchmark

if TYPE_CHECKING:
    import pandas
    from torch import nn


ALONE: Mapping[str, Any] = {"train": {"epochs": 1}}
"""The protocol of a benchmark that is named alone; nothing is trained by it."""
PUBLISHED: Mapping[str, str] = {
    "tofu": "tofu-phi-1.5-forget10",
    "muse": "muse-news-llama2-7b",
    "tdec": "tdec-gpt-neo-125m",
    "wmdp": "wmdp-zephyr-7b",
    "rwku": "rwku-llama3-8b",
}
"""Benchmark that is named alone -> the suite that asks its published data."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured of one model.

    Attributes:
        name: Of the probe or the benchmark.
        metrics: Metric -> value; None where it is undefined.
        rows: Of a probe: row (such as a task) -> column -> value.
        notes: What the numbers depend on, by name.
        extent: Which rows of the data were asked, in words; empty for all.
    """

    name: str
    metrics: Mapping[str, float | None]
    rows: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    extent: str = ""

    @property
    def mean(self) -> Mapping[str, float | None]:
        """The mean over the rows of a probe, in percent; empty where it has none."""
        return {k: v for k, v in self.metrics.items() if k == f"{self.name}.mean"}

    @property
    def section(self) -> Section:
        """A table with what its numbers depend on."""
        rows = self.rows or {name: {"value": value} for name, value in self.metrics.items()}
        heads = list(dict.fromkeys(name for row in rows.values() for name in row))
        cells = [[row, *(_cell(columns.get(h)) for h in heads)] for row, columns in rows.items()]
        mean = "".join(f"Mean: {number(value, 2)} %. " for value in self.mean.values())
        notes = (f"{key}: {v}" for key, v in self.notes.items() if isinstance(v, int | str))
        text = mean + "; ".join(notes)
        title = f"{self.name} ({self.extent})" if self.extent else self.name
        shown = (Column(h, doc="counts the samples") if h == "n" else h for h in heads)
        return Section(title, (text,), table([self.name, *shown], cells or [[MISSING]]))

    def to_frame(self) -> pandas.DataFrame:
        """The rows of a probe, or a line per metric of a benchmark."""
        import pandas

        if self.rows:
            return pandas.DataFrame.from_dict(dict(self.rows), orient="index")
        return pandas.DataFrame({"value": dict(self.metrics)})

    def __str__(self) -> str:
        """The table in Markdown."""
        return markdown.write([self.section])

    def _repr_html_(self) -> str:
        """The table as a notebook shows it."""
        return html.fragment([self.section])


def _cell(value: float | None) -> str:
    return number(value, 0 if value is not None and value.is_integer() and value >= 1 else 4)


def evaluate(
    model: nn.Module | str | Path,
    benchmark: str,
    *,
    settings: Mapping[str, Any] | Sequence[str] = (),
    seed: int = 1,
    tokenizer: Any = None,
    data_root: str | Path | None = None,
    device: str | None = None,
    plugins: Sequence[str] = (),
) -> Evaluation:
    """Measures one model.

    What needs a retrained model, such as forget quality or the distance to Retrain, is left out:
    :func:`run` trains one.  Images get the mean and std that a timm model's config names, and
    its size unless the settings say another one; a model of any size with the suite's architecture
    keeps the suite's.  Any other classifier reads them as the suite's own model does.

    Args:
        model: A causal language model of transformers, an image classifier, or the folder or hub
            id of one.
        benchmark: A probe (``reasoning``, ``perplexity``, ``dialogue``, ``lm_eval``), a suite, of
            which the data and the evaluation are taken, or a benchmark: :data:`PUBLISHED` says
            whose data it takes.
        settings: Of the probe, or overrides of the protocol: nested, or texts such as
            ``scenario.kind=forget01``.
        seed: Of the forget set of a benchmark.
        tokenizer: Of a language model in memory; None reads that of the folder or hub id that the
            model came from.
        data_root: Folder with local data sets.
        device: Of torch; None takes that of a model in memory, else the first accelerator.
        plugins: Python files that register probes or benchmarks.

    Returns:
        Metrics by name; :meth:`Evaluation.to_frame` makes a table of them.

    Raises:
        UserError: Something that is given can be mended.
        Diverged: An output of the model is not finite.

    Example:
        >>> measured = evaluate(llm, "perplexity", settings=["files.mine=my.txt"])
        >>> list(measured.metrics)
        ['perplexity.mine']
    """
    load_plugins(listed(plugins))
    root = None if data_root is None else Path(data_root)
    given, place = read_given(model, tokenizer), device or place_of(model)
    overrides = settings if isinstance(settings, Mapping) else apply_overrides({}, listed(settings))
    with left_as_it_is(model):
        if benchmark in PROBES:
            probe = text_probe(make_probe(benchmark, overrides, benchmark))
            return measure(probe, probed(given, data_root=root, device=place))
        runtime = Runtime(data_root=root, device=place)
        return _benchmarked(given, benchmark, overrides, seed, runtime)


def read_given(model: Any, tokenizer: Any = None) -> Any:
    """A checkpoint of a folder or hub id, or a model in memory in its place: ``load``, ``name``."""
    if isinstance(model, str | Path):
        path = Path(model)
        return read_checkpoint(path) if is_timm(path) else read_causal(path)
    if hasattr(model, "get_input_embeddings"):
        return GivenCausal(model, tokenizer)
    return model


def probed(given: Any, *, data_root: Path | None, device: str) -> ProbedModel:
    """A language model of :func:`read_given` as probes ask it; their files are in ``data_root``."""
    if not _is_causal(given):
        raise CheckpointError("probes ask language models, and this is an image classifier")
    return as_probed(given, data_root=data_root, device=device)


def text_probe(probe: Probe) -> TextProbe:
    """The probe itself; one that reads what only a suite has is refused."""
    if not isinstance(probe, TextProbe):
        raise ConfigError(f"{probe.name}: needs a suite (probes:); leave it out")
    return probe


def measure(probe: TextProbe, asked: ProbedModel) -> Evaluation:
    """What a probe measures of a model."""
    made = probe.table(asked)
    return Evaluation(probe.name, probe.summary(made), made.rows, made.notes, probe.extent)


def _benchmarked(
    given: Any, name: str, overrides: Mapping[str, Any], seed: int, runtime: Runtime
) -> Evaluation:
    from stable_forgetting.common.train.precision import tensor_float
    from stable_forgetting.vision.apply.memory import in_float32

    cls, protocol = _protocol(name)
    if (cls.modality == "language") != _is_causal(given):
        kind = "a language model" if _is_causal(given) else "an image classifier"
        raise CheckpointError(f"{name} is a benchmark of other models; this is {kind}")
    with ExitStack() as stack:
        if cls.modality == "language":
            old = protocol.get("model", {})
            kept = {name: old[name] for name in ("template", "style") if name in old}
            protocol["model"] = {**kept, **_words(given, stack)}
        config = validate(cls.Config, merge(protocol, overrides), f"{name}: settings")
        benchmark = cls(config, runtime)
        loaded = given.load() if hasattr(given, "load") else given
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if cls.modality == "vision":
            model = in_float32(model)
        model = model.to(pick_device(runtime.device)).eval()
        notes: dict[str, Any] = {}
        if isinstance(benchmark, VisionBenchmark):
            side = overrides.get("data", {}).get("image_size")
            notes["images"] = _fit_images(benchmark, model, side, name)
        _check_context(model, config, name)
        if isinstance(benchmark, CausalBenchmark):
            benchmark.measures(model)
        stack.enter_context(tensor_float(pick_device(runtime.device)))  # as the stages of a suite
        parts = benchmark.parts(benchmark.split(seed), trial=False, seed=seed)
        metrics = benchmark.evaluate(benchmark.score(model, parts), trial=False, seed=seed)
    sizes = {part: len(indices) for part, indices in parts.items()}
    return Evaluation(name, metrics, notes={"data": benchmark.provenance, **notes, **sizes})


def _is_causal(given: Any) -> bool:
    return isinstance(given, CausalCheckpoint | GivenCausal)


def _protocol(name: str) -> tuple[type[Benchmark], dict[str, Any]]:
    """A benchmark and the protocol of a suite, or of the benchmark that is named alone."""
    name = PUBLISHED.get(name, name)
    if name in BENCHMARKS:
        return BENCHMARKS[name], dict(ALONE)
    known = [*PROBES.names(), *BENCHMARKS.names(), *suite_names()]
    if not is_file(name) and name not in known:
        raise ConfigError(f"no probe, benchmark or suite is called '{name}'{close_to(name, known)}")
    suite = load_suite(name)
    return BENCHMARKS[suite.spec.benchmark], dict(canonical(suite.protocol))


def _words(given: Any, stack: ExitStack) -> dict[str, Any]:
    """The protocol's model: whose tokenizer it is."""
    if hasattr(given, "folder"):
        return {"name": str(given.folder), "tokenizer": str(given.words)}
    folder = stack.enter_context(TemporaryDirectory())
    given.tokenizer.save_pretrained(folder)
    return {"name": given.name, "tokenizer": folder}


def _fit_images(benchmark: VisionBenchmark, model: Any, side: int | None, name: str) -> str:
    """Has images prepared as the classifier takes them; says how.

    Their side is the one asked for, or else the model's own.  Where the suite has this architecture
    and that takes any size, their side is the suite's.
    """
    import torch

    from stable_forgetting.vision.apply.memory import width_of

    data, about = benchmark.config.data, getattr(model, "pretrained_cfg", None)
    if about:
        own = Preprocessing.of(model)
        if own.channels != data.channels:
            raise ConfigError(
                f"{name}: its images have {data.channels} channels, and the model takes "
                f"{own.channels}; choose another suite"
            )
        fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)
        same = about.get("architecture") == benchmark.architecture.partition(".")[0]
        suites = data.image_size or benchmark.config.model.image_size
        kept = suites if same and not fixed else None
        spec = (side or kept or own.size, own.mean, own.std)
        benchmark.spec = type(benchmark.spec)(*spec)
    size, mean, std = benchmark.spec
    mend = "give settings=['data.image_size=N']"
    width = width_of(model, torch.zeros(data.channels, size, size), name, mend)
    if width != benchmark.num_classes:
        raise ConfigError(
            f"{name}: has {benchmark.num_classes} classes, and the model tells {width} apart; "
            "choose another suite"
        )
    means, stds = (", ".join(f"{value:g}" for value in values) for values in (mean, std))
    owner = "model" if about else "suite"
    return f"{size} px, with the {owner}'s mean {means} and std {stds}"


def _check_context(model: Any, config: Any, name: str) -> None:
    """Raises :class:`ConfigError` where a language model cannot read the longest rows."""
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    longest = getattr(config.data, "max_length", None)
    if context and longest and longest > context:
        raise ConfigError(
            f"{name}: its rows have up to {longest} tokens, and the model reads {context}; set "
            f"data.max_length={context}, which cuts longer rows"
        )
