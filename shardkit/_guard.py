"""What of an optimizer is the session's while it is open."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

from shardkit.errors import StateError

if TYPE_CHECKING:
    from torch.optim import Optimizer


def guard(optimizer: Optimizer) -> dict[str, Any]:
    """Refuse those calls on the optimizer that are the session's, whose effect would differ among backends.

    Returns what the instance had of its own under these names, such as a ``step`` that a schedule wrapped.
    """
    refused = {
        "step": "session.step() updates the weights",
        "zero_grad": "session.step() drops the gradients",
        "add_param_group": "close the session, add the group, and prepare again",
        "state_dict": "session.save(directory) writes the optimizer's state under every strategy",
        "load_state_dict": "session.load(directory) reads the optimizer's state under every strategy",
    }

    def refusal(name: str, instead: str) -> MethodType:
        def refuse(optimizer: Optimizer, *args: Any, **kwargs: Any) -> NoReturn:
            raise StateError(f"optimizer.{name} is the session's while it is open: {instead}")

        # As a schedule marks the step that it has wrapped: it need not wrap this one, nor miss its own mark.
        refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return MethodType(refuse, optimizer)

    own = {name: optimizer.__dict__.get(name) for name in refused}
    optimizer.__dict__.update({name: refusal(name, instead) for name, instead in refused.items()})
    return own


def unguard(optimizer: Optimizer, own: dict[str, Any]) -> None:
    """Give an optimizer back what :func:`guard` took from it."""
    for name, value in own.items():
        optimizer.__dict__.pop(name, None)
        if value is not None:
            optimizer.__dict__[name] = value
