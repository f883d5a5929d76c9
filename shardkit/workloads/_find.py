"""From the text that names a workload to the function that makes it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from shardkit.errors import InputError
from shardkit.workloads import Workload
from shardkit.workloads._settings import read, require_all, typed

DEFAULT_FUNCTION = "workload"

SIZES = {
    "_t5": ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b"),
    "_gpt2": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
}
"""The modules whose workload comes in several sizes, and the names of these."""


def names() -> list[str]:
    """Return the names of the built-in workloads: the public modules of this package, and the sizes of others."""
    files = Path(__file__).parent.glob("*.py")
    alone = [file.stem.replace("_", "-") for file in files if not file.stem.startswith("_")]
    return sorted([*alone, *(name for sizes in SIZES.values() for name in sizes)])


def check(text: str) -> str:
    """Return the text, a file's path made absolute, if such a workload may exist; imports nothing.

    Raises:
        InputError: no built-in workload has this name, there is no such file, or the settings aren't written as such.
    """
    asked = _split(text)
    settings = ",".join(f"{name}={value}" for name, value in read(text, asked.settings).items())
    if asked.file is None:
        if asked.name not in names():
            near = get_close_matches(asked.name, names(), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(
                f"no workload is named {asked.name!r}: {hint}built in are {', '.join(names())}, and one of your own is "
                "FILE.py or FILE.py:function"
            )
        return f"{asked.name}:{settings}" if settings else asked.name
    if not asked.file.is_file():
        raise InputError(f"there is no workload file {str(asked.file)!r}")
    if not asked.name.isidentifier():
        raise InputError(f"a workload of your own reads FILE.py or FILE.py:function, not {text!r}")
    return ":".join(filter(None, (str(asked.file.resolve()), asked.name, settings)))


def function(text: str) -> Callable[[], Workload]:
    """Return the function that makes the workload; imports its module.

    Raises:
        InputError: there is no such name, file or function, it doesn't take these settings or needs others, or, once it
            is called, it returns something else.
    """
    make = any_function(text)
    require_all(make, f"workload {text!r}")

    def checked() -> Workload:
        made: Any = make()
        if not isinstance(made, Workload):
            raise InputError(
                f"workload {text!r} returns a {type(made).__name__}: it returns a "
                "shardkit.Workload(model, optimizer, loss, batches)"
            )
        return made

    return checked


def any_function(text: str) -> Callable[..., Any]:
    """Return the function that a text names, with its settings, whatever it takes and returns; imports its module.

    Raises:
        InputError: there is no such name, file or function, or it doesn't take these settings.
    """
    asked = _split(check(text))
    found: Any
    if asked.file is None:
        found = _built_in(asked.name)
    else:
        module = _import_file(asked.file)
        found = getattr(module, asked.name, None)
        if not callable(found):
            own = [
                key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__
            ]
            known = f"its functions are {', '.join(own)}" if own else "it defines none"
            raise InputError(f"workload file {str(asked.file)!r} has no function {asked.name!r}: {known}")
    settings = typed(found, read(text, asked.settings), f"workload {_title(asked)!r}")
    return partial(found, **settings) if settings else found


def _built_in(name: str) -> Callable[..., Any]:
    for module, sizes in SIZES.items():
        if name in sizes:
            return partial(importlib.import_module(f"{__package__}.{module}").workload, name)
    return importlib.import_module(f"{__package__}.{name.replace('-', '_')}").workload  # type: ignore[no-any-return]


class _Asked(NamedTuple):
    """A text that names a workload: ``file`` is None and ``name`` the workload's for a built-in one, or else ``name``
    is the function's."""

    file: Path | None
    name: str
    settings: str


def _split(text: str) -> _Asked:
    path = re.match(r"(.+?\.py)(?::|$)", text)
    if path is None:
        name, _, settings = text.partition(":")
        return _Asked(None, name, settings)
    rest = text[path.end() :]
    if path[0].endswith(".py") or "=" in rest.partition(":")[0]:
        return _Asked(Path(path[1]), DEFAULT_FUNCTION, rest)
    function, _, settings = rest.partition(":")
    return _Asked(Path(path[1]), function, settings)


def _title(asked: _Asked) -> str:
    return asked.name if asked.file is None else f"{asked.file.name}:{asked.name}"


@cache
def _import_file(file: Path) -> ModuleType:
    # As for a script, what lies beside the file can be imported.
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    # Under a name of its own, which hides no other module, and known, so that what it defines can be pickled.
    spec = importlib.util.spec_from_file_location(f"shardkit_workload_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(file)!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
