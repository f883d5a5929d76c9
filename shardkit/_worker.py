"""One rank of :func:`shardkit.launch`: ``python -m shardkit._worker CALL RESULT``."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle


def main(call: Path, result: Path) -> NoReturn:
    """Call what lies in one file, write what comes of it to the other, and exit."""
    status = 0
    outcome: dict[str, Any]
    try:
        function, arguments = cloudpickle.loads(call.read_bytes())
        value = function(*arguments)
        try:
            outcome = {"value": cloudpickle.dumps(value)}
        except Exception as error:
            raise TypeError(f"the result, a {type(value).__name__}, can't be sent back: {error}") from error
    except BaseException:
        # Time says which rank failed first: the others' errors are mostly lost connections to it.
        outcome = {"traceback": traceback.format_exc(), "time": time.time()}
        status = 1
    draft = result.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(outcome))
    draft.rename(result)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end: a worker thread of gloo may still hold tensors (pytorch/pytorch#190489).
    os._exit(status)


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel end this process, by this signal, when the one that launched it ends, however that comes about.

    One that has ended already, it doesn't notice.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


_PR_SET_PDEATHSIG = 1


if __name__ == "__main__":
    die_with_parent()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
