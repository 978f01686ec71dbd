"""Which param group each parameter belongs to: its role, and the first override that names it."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mars_ds.optim.config import GroupOverride, OptimizerConfig
from mars_ds.optim.kinds import ROLES, Role
from mars_ds.optim.routing import check_patterns, role_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterGroup:
    """One param group before it has tensors.

    Attributes:
        role: Decides the rule.
        override: Pattern of the override that it takes, or None.
        shapes: Members by name, in model order.
        settings: What `Mars` reads at each step.
    """

    role: Role
    override: str | None
    shapes: Mapping[str, Shape]
    settings: dict[str, Any]


def plan_groups(shapes: Mapping[str, Shape], config: OptimizerConfig) -> list[ParameterGroup]:
    """Deals parameters to groups: by role, and within a role by override; never an empty group.

    Args:
        shapes: True shapes of the trainable parameters by name, in model order.
        config: Optimizer settings.

    Raises:
        ValueError: A route or an override that matches nothing, or a setting that the rule does not read.
    """
    config = config.resolved()
    overrides = config.overrides or {}
    check_patterns("routes", config.routes or {}, shapes)
    check_patterns("overrides", overrides, shapes)
    groups = []
    for role in ROLES:
        members = {n: shape for n, shape in shapes.items() if role_of(n, shape, config.routes) == role}
        for pattern in (None, *overrides):
            chosen = {n: shape for n, shape in members.items() if _override_of(n, overrides) == pattern}
            if chosen:
                settings = config.group_settings(role)
                if pattern is not None:
                    settings |= _overridden(settings, pattern, overrides[pattern], config)
                groups.append(ParameterGroup(role, pattern, chosen, settings))
    return groups


def _override_of(name: str, overrides: Mapping[str, GroupOverride]) -> str | None:
    return next((pattern for pattern in overrides if fnmatchcase(name, pattern)), None)


def _overridden(
    settings: Mapping[str, Any], pattern: str, override: GroupOverride, config: OptimizerConfig
) -> dict[str, Any]:
    """The settings that an override changes."""
    changed: dict[str, Any] = {k: v for k, v in override.model_dump().items() if v is not None and k != "lr"}
    for key in changed:
        if settings.get(key) is None:
            raise ValueError(
                f"optimizer.overrides: {pattern!r} sets {key}, which the {settings['rule']} rule of role "
                f"{settings['role']} does not read; nearest: lr, weight_decay"
            )
    if override.lr is not None:
        if not config.lr:
            raise ValueError(f"optimizer.overrides: {pattern!r} sets lr as a ratio of optimizer.lr, which is 0")
        changed["lr_factor"] = override.lr / config.lr
    return changed
