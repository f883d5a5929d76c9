"""Asks a backend, in a fresh interpreter, what it declares, and prints what came of it as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_type_hints

from shardkit import Backend, ModelSize, ParameterSize, Strategy, _registry
from shardkit._backend import option_fields
from shardkit._options import typed_options
from shardkit.errors import ShardkitError

HEAVY = ("torch", "numpy", "transformers")
"""What no plugin imports to describe itself, beside its own library and those of others."""


def main() -> None:
    """Print, of the backend whose name is the first argument, what is imported when, and what it refuses."""
    backend = _registry.describe(sys.argv[1])
    libraries = {other.library for other in _registry.backends().values() if other.library}
    found: dict[str, Any] = {"described": _loaded({*HEAVY, *libraries})}
    own = {one for one in (backend.library,) if one}
    _plan(backend)
    found["planned"] = _loaded(own)
    found["refused"] = {}
    for what, asked in {"option": _options, "value": _values, "precision": _precisions, "device": _devices}.items():
        found["refused"][what] = [_told(text, ask) | {"loaded": _loaded(own)} for text, ask in asked(backend)]
    print(json.dumps(found))


def _loaded(names: set[str]) -> list[str]:
    return sorted(name for name in names if name in sys.modules)


def _plan(backend: Backend) -> None:
    model = ModelSize((ParameterSize("w", (8, 8), 4, True, True), ParameterSize("b", (8,), 4, True, True)), 2)
    for variant in backend.variants:
        strategy = Strategy.parse(variant.strategy)
        _registry.footprint(backend.name, model, strategy, typed_options(backend, strategy.options))


Asked = Iterator[tuple[str, Callable[[], object]]]
"""What is asked for, in words, and a function that asks for it."""


def _options(backend: Backend) -> Asked:
    yield "option no_such_option=1", partial(_prepare, backend, {"no_such_option": 1})


def _values(backend: Backend) -> Asked:
    hints = get_type_hints(backend.options)
    for name in option_fields(backend.options):
        if hints[name] in (bool, int, float):
            yield f"option {name}='nonsense'", partial(_prepare, backend, {name: "nonsense"})


def _precisions(backend: Backend) -> Asked:
    for precision in sorted({"fp32", "bf16", "fp16"} - backend.precisions):
        yield f"precision {precision}", partial(_prepare, backend, {}, precision=precision)


def _devices(backend: Backend) -> Asked:
    import torch

    from shardkit._checks import check_fit

    strategy = Strategy(backend.name)
    for kind in sorted({"cpu", "cuda", "xpu", "mps"} - backend.devices):
        yield f"device {kind}", partial(check_fit, backend, strategy, torch.device(kind))
    for variant in backend.variants:
        for kind in sorted(backend.devices - (backend.devices if variant.devices is None else variant.devices)):
            parsed = Strategy.parse(variant.strategy)
            yield f"{variant.strategy} on {kind}", partial(check_fit, backend, parsed, torch.device(kind))


def _prepare(backend: Backend, options: dict[str, Any], **fields: Any) -> object:
    import torch

    import shardkit

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shardkit.prepare(model, optimizer, Strategy(backend.name, options=options, **fields))


def _told(asked: str, ask: Callable[[], object]) -> dict[str, Any]:
    try:
        ask()
    except ShardkitError as error:
        return {"asked": asked, "error": type(error).__name__, "message": str(error)}
    except Exception as error:
        return {"asked": asked, "error": type(error).__name__, "message": f"{error} (no error of shardkit's)"}
    return {"asked": asked, "error": "nothing", "message": "it was taken"}
