"""From the text that names a workload to the function that makes it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from shardkit.errors import InputError
from shardkit.workloads import Workload

DEFAULT_FUNCTION = "workload"


def names() -> list[str]:
    """Return the names of the built-in workloads: the public modules of this package."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(file.stem.replace("_", "-") for file in files if not file.stem.startswith("_"))


def check(text: str) -> str:
    """Return the text, a file's path made absolute, if such a workload may exist; imports nothing.

    Raises:
        InputError: no built-in workload has this name, or there is no such file.
    """
    file, function = _split(text)
    if file is None:
        if text not in names():
            near = get_close_matches(text, names(), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(
                f"no workload is named {text!r}: {hint}built in are {', '.join(names())}, and one of your own is "
                "FILE.py or FILE.py:function"
            )
        return text
    if not file.is_file():
        raise InputError(f"there is no workload file {str(file)!r}")
    if not function.isidentifier():
        raise InputError(f"a workload of your own reads FILE.py or FILE.py:function, not {text!r}")
    return f"{file.resolve()}:{function}"


def function(text: str) -> Callable[[], Workload]:
    """Return the function that makes the workload; imports its module.

    Raises:
        InputError: there is no such name, file or function, or, once it is called, it returns something else.
    """
    make = any_function(text)

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
    """Return the function that a text names, whatever it takes and returns; imports its module.

    Raises:
        InputError: there is no such name, file or function.
    """
    file, name = _split(check(text))
    module = _import_file(file) if file is not None else importlib.import_module(f"{__package__}.{_module(text)}")
    found: Any = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    near = [key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__]
    known = f"its functions are {', '.join(near)}" if near else "it defines none"
    raise InputError(f"workload file {str(file)!r} has no function {name!r}: {known}")


def _split(text: str) -> tuple[Path | None, str]:
    """Return the file, None for a built-in name, and the name of the function."""
    path, _, function = text.rpartition(":")
    if path.endswith(".py"):
        return Path(path), function
    if text.endswith(".py"):
        return Path(text), DEFAULT_FUNCTION
    return None, DEFAULT_FUNCTION


def _module(name: str) -> str:
    return name.replace("-", "_")


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
