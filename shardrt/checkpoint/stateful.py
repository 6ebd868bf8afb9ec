"""Values with a state that they can give and take."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard


class Stateful(Protocol):
    """What has a state that it can give and take."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def has_state(value: object) -> TypeGuard[Stateful]:
    """Whether a value has both methods of a state; a class has none of its own."""
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict"))
