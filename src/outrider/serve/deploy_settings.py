"""Settings of replicas, complete when built and never changed after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import invalid, suggesting
from outrider.fields import check_fields, known_options, setting
from outrider.serve.model_spec import ModelSpec
from outrider.serve.settings import ServeSettings

# What one server has for itself: folders that it locks, addresses, and drafts that are swapped in one engine.
NOT_SHARED = ("batch_folder", "keep_traffic", "kv_events", "draft_folders")


@suggesting
@dataclass(frozen=True, slots=True)
class DeploySettings:
    """How many replicas a model has, and what each takes of the cluster."""

    min_replicas: int = setting(1, 1, help="Replicas of a model at least.")
    max_replicas: int = setting(
        1, 1, help="Replicas at most; more than the least: by running and waiting requests."
    )
    target_requests: float = setting(
        8.0, above=0, help="Requests for each replica, running and waiting, that scaling aims at."
    )
    replica_requests: int = setting(
        64, 1, help="Requests that a replica takes at once; others wait or go elsewhere."
    )
    replica_cpus: float = setting(1.0, 0, help="Cores that the scheduler reserves for a replica.")
    replica_gpus: float = setting(
        0.0, 0, help="GPUs that it reserves; a part of one, such as 0.5, is shared."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_replicas < self.min_replicas:
            text = f"({self.max_replicas}) must be at least min_replicas ({self.min_replicas})"
            raise invalid("max_replicas", text)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> DeploySettings:
        """Builds from a mapping of names. Refuses unknown names with a suggestion."""
        return cls(**known_options(cls, options, "setting"))


@dataclass(frozen=True, slots=True)
class DeployPlan:
    """Everything that is deployed: models with their replicas, and the address in front of them."""

    models: tuple[tuple[ModelSpec, DeploySettings], ...]
    serve: ServeSettings

    def __post_init__(self) -> None:
        for spec, _ in self.models:
            for name in NOT_SHARED:
                if getattr(spec.serve, name):
                    raise invalid(name, "is for outrider serve: replicas cannot share it; leave it out")

    @property
    def table(self) -> list[ModelSpec]:
        return [spec for spec, _ in self.models]
