"""The hooks that a plugin implements. Pluggy dispatches them at ``prepare``; the step's hot path has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from shardkit._backend import Backend
from shardkit._engine import Engine
from shardkit._finding import Finding
from shardkit._footprint import Footprint, ModelSize
from shardkit._imported import Imported, Source

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from shardkit._strategy import Strategy

hookspec = pluggy.HookspecMarker("shardkit")


@hookspec(firstresult=True)
def shardkit_describe() -> Backend | None:
    """Declare the backend. Must not import its library, nor torch."""


@hookspec(firstresult=True)
def shardkit_prepare(model: nn.Module, optimizer: Optimizer | None, strategy: Strategy, options: Any) -> Engine | None:
    """Build the engine. Collective.

    ``model`` is the user's module, checked, with rank 0's weights and buffers on every rank. ``optimizer`` is over
    parameters of the model, each once; None when the user gave none: return None then, unless the options bring one,
    and the session is one for evaluation. ``strategy`` is what the user asked for and ``options`` the backend's own
    options dataclass, both checked. The default process group exists.
    """


@hookspec(firstresult=True)
def shardkit_control(model: nn.Module, optimizer: Optimizer, strategy: Strategy, options: Any) -> Engine | None:
    """Build an engine that is the library by itself: as its documentation shows, with its own defaults. Optional.

    Collective. What the strategy or the options ask for is said to the library, and nothing else; what it does wrong
    stays wrong. ``shardkit parity upgrade`` runs it beside the plugin's own engine, since a default that changed, or a
    race, need not show under that. It is called with any version of the library. A window has ``strategy.accumulate``
    micro-batches that count the same; a control may refuse others. The arguments are those of ``shardkit_prepare``.
    """


@hookspec(firstresult=True)
def shardkit_footprint(model: ModelSize, strategy: Strategy, options: Any) -> Footprint | None:
    """Say what the engine would hold in memory of a model, for ``shardkit plan``. Optional.

    Without it the planner goes by what the variant declares to be sharded and offloaded. Must not import the library:
    a plan is made where it needn't be installed. ``strategy`` and ``options`` are as in ``shardkit_prepare``.
    """


@hookspec(firstresult=True)
def shardkit_diagnose() -> list[Finding] | None:
    """Say what on this machine helps or harms the backend's library. Optional; ``shardkit doctor`` prints it.

    Must not import the library: it may be the library that is broken. Installed versions stand in
    ``importlib.metadata``.
    """


@hookspec(firstresult=True)
def shardkit_import(source: Source) -> Imported | None:
    """Read a checkpoint of the backend's library, for ``shardkit import``; None if the source is none. Optional.

    Called without a process group, in one process. Must not import the library: a checkpoint comes in where it isn't
    installed. Files are read with ``source.load``, which runs no code of theirs.
    """
