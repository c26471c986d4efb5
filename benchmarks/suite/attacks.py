"""What a suite may ask of attacks."""

from __future__ import annotations

from stable_forgetting.benchmarks.suite.suite import Suite
from stable_forgetting.common.audits import make_audit
from stable_forgetting.common.audits.base import Audit, ModelAudit
from stable_forgetting.common.base.errors import ConfigError

NO_RETRAIN = (
    "attacks are read beside a Retrain, and no row has method retrain; "
    "give --set methods.retrain={} to run and to attack"
)


def make_audits(spec: Suite, origin: str) -> dict[str, Audit]:
    """The audits of a report: those that need no further training of models.

    Raises:
        ConfigError: One is not valid, trains models of its own, or has no Retrain beside it.
    """
    audits = {}
    for name, values in spec.audits.items():
        audits[name] = make_audit(name, values, f"{origin}.{name}")
        if audits[name].info.tier == "shadows":
            raise ConfigError(
                f"{origin}.{name}: trains models of its own; leave it out and run: unlearn attack "
                f"SUITE --attacks {name}, which prints the cost first"
            )
    if audits and "retrain" not in spec.method_of.values():
        raise ConfigError(f"{origin}: {NO_RETRAIN}")
    return audits


def check_tuning(spec: Suite, origin: str) -> None:
    """Refuses an attack of tuning that does not say what it shows of one model."""
    name = spec.tune.after_attack if spec.tune else None
    if name is not None:
        attack = make_audit(name, {}, origin)
        if not isinstance(attack, ModelAudit) or not attack.leaks or attack.referenced:
            raise ConfigError(f"{origin}: '{name}' attacks no single model; choose relearn_few")
