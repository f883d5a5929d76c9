"""The moments of a save: each operation on files and each exchange among ranks, to be killed at or to fail."""

from __future__ import annotations

import builtins
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

OPERATIONS: dict[str, tuple[Any, ...]] = {
    "open": (os,),
    "pwrite": (os,),
    "fsync": (os,),
    "mkdir": (os,),
    "rename": (os,),
    "unlink": (os,),
    "rmdir": (os,),
    "all_gather_object": (dist,),
}
"""What a save does, by name, and where it is looked up."""


def die() -> None:
    """End this process at once, as a power cut or the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def dies_after(seconds: float) -> None:
    """End this process after a time, wherever it is by then."""
    threading.Timer(seconds, die).start()


@contextmanager
def watched(reached: Callable[[str], None]) -> Any:
    """Within it, ``reached`` is called before and after each operation, and in the middle of each write."""

    def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            try:
                reached(f"before {name}")
            except OSError as error:
                # As the operating system does.
                error.filename = None if isinstance(arguments[0], int) else str(arguments[0])
                raise
            if name == "pwrite" and len(arguments[1]) > 1:
                descriptor, data, offset = arguments
                half = len(data) // 2
                written = original(descriptor, data[:half], offset)
                reached("within pwrite")
                if written == half:
                    written += original(descriptor, data[half:], offset + half)
                result: Any = written
            else:
                result = original(*arguments, **settings)
            reached(f"after {name}")
            return result

        return call

    with ExitStack() as stack:
        for name, places in OPERATIONS.items():
            for place in places:
                stack.enter_context(mock.patch.object(place, name, around(name, getattr(place, name))))
        for module in (builtins, io):
            opened = around("create", module.open)
            only = _only_writing(opened, module.open)
            stack.enter_context(mock.patch.object(module, "open", only))
        yield


def _only_writing(opened: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: Any, mode: str = "r", *arguments: Any, **settings: Any) -> Any:
        return (original if mode in ("r", "rb") else opened)(file, mode, *arguments, **settings)

    return call


class Record:
    """Notes the moments of a save in their order."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def __call__(self, moment: str) -> None:
        self.moments.append(moment)


class Fate:
    """Does something at a moment of one kind: the first if ``number`` is 0, of those behind a moment of another."""

    def __init__(self, kind: str, number: int, behind: str, act: Callable[[], None]) -> None:
        self._kind = kind
        self._left = number
        self._behind = behind
        self._act = act

    def __call__(self, moment: str) -> None:
        if self._behind:
            self._behind = "" if moment == self._behind else self._behind
        elif moment == self._kind:
            self._left -= 1
            if self._left == -1:
                self._act()
