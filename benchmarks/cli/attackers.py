"""Options of ``attack``: further models, a model of the user's, how strong the attacker is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from stable_forgetting.benchmarks.audits.plan import Shadows
from stable_forgetting.common.audits import AUDITS
from stable_forgetting.common.audits.base import ModelAudit
from stable_forgetting.common.base.errors import ConfigError


@dataclass(frozen=True)
class ShadowOptions:
    """Which models attacks over many models need."""

    shadows: Annotated[
        int,
        typer.Option(help="Train N further models per row and seed; prints the cost first.", min=0),
    ] = 0
    design: Annotated[
        str, typer.Option(help="Shadows: fixed (one forget set) or halves (random halves).")
    ] = "fixed"
    originals: Annotated[
        int, typer.Option(help="Different Originals under fixed shadows; 0: one each.", min=0)
    ] = 0
    yes: Annotated[bool, typer.Option("--yes", help="Train them, after the cost was printed.")] = (
        False
    )

    def population(self) -> Shadows | None:
        """The shadows to train; None without any."""
        if self.design not in ("fixed", "halves"):
            raise ConfigError(f"--design {self.design}: choose fixed or halves")
        if self.shadows == 0:
            return None
        if self.shadows < 2:
            raise ConfigError("--shadows 1: a distribution needs two models or more")
        if self.originals and self.design == "halves":
            raise ConfigError("--originals: halves need an Original each; leave it out")
        return Shadows(self.shadows, self.design, self.originals or None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Given:
    """A model of the user's, with the models and samples that it is attacked beside and with."""

    model: Annotated[
        Path | None,
        typer.Option(help="Attack this model instead: folder, or hub id of a text one."),
    ] = None
    original: Annotated[
        Path | None, typer.Option(help="With --model: the model before unlearning.")
    ] = None
    retrained: Annotated[
        list[Path] | None,
        typer.Option(help="With --model: one or two models that never saw the forgotten."),
    ] = None
    forget: Annotated[Path | None, typer.Option(help="With --model: what was forgotten.")] = None
    retain: Annotated[Path | None, typer.Option(help="With --model: what was kept.")] = None
    test: Annotated[Path | None, typer.Option(help="With --model: what no model saw.")] = None

    def suspects(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """Label -> model, and role -> samples.

        Raises:
            ConfigError: Something is missing, or there are more than two Retrains.
        """
        needed = {name: getattr(self, name) for name in ("model", "original", "forget", "retain")}
        missing = ", ".join(f"--{name}" for name, value in needed.items() if value is None)
        if missing:
            raise ConfigError(f"attack --model: give {missing}")
        retrained = self.retrained or []
        if len(retrained) > 2:
            raise ConfigError("--retrained: give one or two")
        models = {"model": self.model, "original": self.original}
        models |= dict(zip(("retrain", "retrain-2"), retrained, strict=False))
        samples = {"forget": self.forget, "retain": self.retain, "test": self.test}
        return (
            {label: path for label, path in models.items() if path is not None},
            {role: path for role, path in samples.items() if path is not None},
        )


@dataclass(frozen=True)
class Budget:
    """How strong the attacker is."""

    samples: Annotated[
        int | None, typer.Option(help="Samples, draws or shots that the attacker has.", min=1)
    ] = None
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps that the attacker takes at most.", min=1)
    ] = None

    def settings(self, name: str) -> dict[str, int]:
        """Those of an attack that takes them."""
        cls = AUDITS[name]
        known = cls.budget if issubclass(cls, ModelAudit) else {}
        given = {known[key]: value for key, value in vars(self).items() if key in known}
        return {key: value for key, value in given.items() if value is not None}
