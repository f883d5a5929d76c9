"""What forks the ranks of trials: ``python -m shardkit.bench._serve FOLDER`` takes orders on stdin, answers on stdout.

Both are JSON, a line for each. It has imported torch, the workload and the backend's library once. When its input ends,
or the process that started it does, it ends the ranks and removes the folder.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

from shardkit._worker import die_with_parent


def main(folder: Path, parent: int) -> None:
    # At Ctrl-C it is the one that started it that ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is printed by libraries is none of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = _Server(parent, answers)
    # Not by an exception, which could come in the midst of the removal of the files.
    signal.signal(signal.SIGTERM, lambda *_: server.end())
    try:
        server.serve()
    finally:
        server.kill()
        # Or they would write files as these are removed.
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
        # Not through the interpreter's end, which takes seconds with what was imported.
        os._exit(0)


class _Server:
    def __init__(self, parent: int, answers: Any) -> None:
        self._parent = parent
        self._ended = False
        self._answers = answers
        self._running: dict[int, int] = {}

    def serve(self) -> None:
        """Do as told until the input ends, or nobody is there to give any."""
        waiting = b""
        while not self._ended and os.getppid() == self._parent:
            ready, _, _ = select.select([0], [], [], 0.02 if self._running else 1)
            if ready:
                more = os.read(0, 2**16)
                if not more:
                    return
                *lines, waiting = (waiting + more).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            self._reap()

    def end(self) -> None:
        """Have :meth:`serve` return."""
        self._ended = True

    def wait(self) -> None:
        """Wait until the ranks that were killed have ended."""
        for process in list(self._running):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)

    def kill(self) -> None:
        """End all ranks, with what they started."""
        for process in list(self._running):
            _kill_group(process)

    def _obey(self, order: dict[str, Any]) -> None:
        if "preload" in order:
            _preload(order["preload"], order["backend"])
            self._say({"preloaded": True})
        elif "start" in order:
            self._start(order)
        elif "kill" in order:
            self.kill()

    def _start(self, order: dict[str, Any]) -> None:
        for rank, environment in enumerate(order["environments"]):
            process = os.fork()
            if process == 0:
                _rank(Path(order["start"]), rank, environment)
            # Also here: whichever of the two comes first.
            with contextlib.suppress(OSError):
                os.setpgid(process, process)
            self._running[process] = rank
        self._say({"started": list(self._running)})

    def _reap(self) -> None:
        for process in list(self._running):
            ended, status, usage = os.wait4(process, os.WNOHANG)
            if ended:
                rank = self._running.pop(process)
                _kill_group(process)
                code = os.waitstatus_to_exitcode(status)
                # In KiB on Linux.
                self._say({"ended": rank, "code": code, "resident": usage.ru_maxrss * 1024, "time": time.time()})

    def _say(self, what: dict[str, Any]) -> None:
        self._answers.write(json.dumps(what) + "\n")


def _preload(task: str, backend: str) -> None:
    """Import what each rank would; what can't be imported is for the ranks to find, which can say so."""
    import torch

    from shardkit import _registry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The first optimizer of a process has torch import its compiler, which takes longer than all the rest.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        for module in ("torch.distributed", "torch.nn.parallel", "shardkit.bench._trial"):
            importlib.import_module(module)
        with contextlib.suppress(Exception, SystemExit):
            library = _registry.describe(backend).library
            if library is not None:
                importlib.import_module(library)
        with contextlib.suppress(Exception, SystemExit):
            _imitate(task)


def _imitate(path: str) -> None:
    """Import what the workload imports as it is made and called, such as a library that its function imports.

    A forked process finds out, on tensors without memory: what it computes may be kept anywhere in the workload.
    """
    import cloudpickle

    from shardkit.workloads import _find

    task = cloudpickle.loads(Path(path).read_bytes())
    make = task.workload if callable(task.workload) else _find.any_function(task.workload)
    told, tell = os.pipe()
    process = os.fork()
    if process == 0:
        # Past all handlers: what becomes of it matters to nobody.
        try:
            _call(make, tell)
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(told) as names:
        modules = names.read().split()
    os.waitpid(process, 0)
    for name in modules:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)


def _call(make: Any, tell: int) -> None:
    """Make the workload, take a batch and compute the loss; tell the names of the modules that came by it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = set(sys.modules)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            workload = make()
            workload.loss(workload.model, next(workload.batches(1)))
    finally:
        os.write(tell, "\n".join(name for name in sys.modules if name not in before).encode())
        os.close(tell)


def _rank(folder: Path, rank: int, environment: dict[str, str]) -> NoReturn:
    """Be a rank, in this forked process, to its end."""
    status = 1
    try:
        server = os.getppid()
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != server:
            sys.exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from shardkit.bench._trial import Files, run

        files = Files(folder, rank)
        output = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, output), (2, output)):
            os.dup2(source, target)
        # What the server imported is no garbage: no collection in a rank needs to walk through it.
        gc.freeze()
        os.environ.update(environment)
        import cloudpickle
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        run(cloudpickle.loads((folder / "task.pickle").read_bytes()), files)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the interpreter's end, which is the server's, and where a thread may still hold tensors.
        os._exit(status)


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
