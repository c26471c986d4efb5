"""What happens inside an audit stage; imported by the process that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.audits import AUDITS
from common.audits.base import ModelAudit
from common.audits.measure import NotApplicable
from common.audits.task import AuditTask, Featured
from common.base.config import validate
from common.base.errors import Diverged

if TYPE_CHECKING:
    from torch import nn

    from benchmarks.pipeline.stage import Stage
    from common.data.splits import ForgetSplit
    from common.protocol.benchmark import Benchmark


def measure(
    stage: Stage,
    benchmark: Benchmark,
    split: ForgetSplit,
    load: Callable[[str], nn.Module],
    *,
    adapted: bool,
) -> dict[str, Any]:
    """Measures of one model, or why there are none.

    Args:
        stage: The audit stage.
        benchmark: Its benchmark.
        split: Its split.
        load: Role of a parent (``model``, ``original``) -> its stored model.
        adapted: Whether the model is stored as an adapter.

    Returns:
        ``measures`` by name and ``not_applicable``, a reason or the empty string.
    """
    cls = AUDITS[stage.spec["audit"]]
    audit: ModelAudit = cls(validate(cls.Config, stage.spec["config"], stage.name))
    audit.parts = benchmark.part_table
    task = AuditTask(
        load=lambda: load("model"),
        load_original=lambda: load("original"),
        adapted=adapted,
        source=benchmark.source,
        split=split,
        family=benchmark,
        collect=benchmark.collect,
        features=benchmark.features if isinstance(benchmark, Featured) else None,
        recipe=benchmark.recipe,
        batch_size=benchmark.evaluation_batch,
        seed=stage.spec["seed"],
    )
    try:
        measures = audit.measure(task)
    except NotApplicable as error:
        return {"measures": {}, "not_applicable": error.reason}
    except Diverged as error:
        return {"measures": {}, "not_applicable": str(error)}
    return {
        "measures": {name: value.to_json() for name, value in measures.items()},
        "not_applicable": "",
    }
