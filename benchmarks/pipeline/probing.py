"""The ``probe`` stage: a table of one model on data of the probe's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stable_forgetting.benchmarks.pipeline.kinds import StageKind
from stable_forgetting.benchmarks.pipeline.measuring import read_stored
from stable_forgetting.benchmarks.pipeline.stage import Placed, StageSpec
from stable_forgetting.common.base.errors import Diverged
from stable_forgetting.common.base.files import write_json
from stable_forgetting.common.protocol.probe import ProbeTable, make_probe
from stable_forgetting.common.store.stages import StageStore

if TYPE_CHECKING:
    from stable_forgetting.benchmarks.pipeline.worksite import Worksite

TABLE = "probe.json"


class ProbeSpec(StageSpec):
    """Fields of a ``probe`` stage; ``config`` as plain values."""

    probe: str
    config: dict[str, Any]


class ProbeModel(StageKind[ProbeSpec]):
    """Measures a stored model with one probe."""

    Spec = ProbeSpec
    order = 6

    def work(self, site: Worksite, spec: ProbeSpec) -> None:
        """Writes the table; none for a model that diverged."""
        facts = site.facts("model")
        probe = make_probe(spec.probe, spec.config, site.stage.name)
        with site.writing() as folder:
            table = ProbeTable({})
            if facts["status"] == "ok":
                try:
                    with site.scoring("model") as model:
                        table = probe.measure(model, site.benchmark)
                except Diverged as error:
                    facts = {"status": "diverged", "status_detail": error.reason}
            site.about |= {key: facts[key] for key in ("status", "status_detail") if key in facts}
            write_json(folder / TABLE, {"rows": table.rows, "notes": table.notes})


def read_table(store: StageStore, stage: Placed) -> ProbeTable | None:
    """A probe's table, empty where the model diverged; None while it is not done.

    Raises:
        DataError: The file is damaged.
    """

    def parse(text: str) -> ProbeTable:
        content = json.loads(text)
        return ProbeTable(content["rows"], content["notes"])

    return read_stored(store, stage, TABLE, parse)
