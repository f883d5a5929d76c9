"""The process group under a session, and how its ranks come to agree."""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from shardkit import errors
from shardkit.errors import InputError, MismatchError, ShardkitError, StateError

if TYPE_CHECKING:
    from torch import Tensor

RENDEZVOUS_SECONDS = 30
"""How long the ranks wait for each other where all must come, such as at a save."""

_incarnations = itertools.count()
_open_sessions = 0
_ours = False


class Agreeing(Protocol):
    """Ranks that exchange values."""

    def agree(self, value: Any, error: BaseException | None = None) -> list[Any]:
        """Return every rank's value; if any rank brings an error, raise the same one on every rank. Collective."""


class Alone:
    """One process that agrees with itself."""

    def agree(self, value: Any, error: BaseException | None = None) -> list[Any]:
        return _agree(None, 1, value, error)


class Processes:
    """The ranks that train together: the default process group, and a control group of ours on the CPU.

    A default group that exists is used and left alone. Otherwise one is made: from the launcher's environment
    variables, or of this process alone; it is destroyed with the last session that uses it.
    """

    def __init__(self, device: torch.device | None) -> None:
        global _open_sessions, _ours
        lockstep = sys.modules.get("shardkit.lockstep")
        if dist.is_initialized() and lockstep is not None and lockstep.broken():
            raise StateError(
                "the ranks parted in the midst of a collective in an earlier session, and the process group can't be "
                "relied on any more: destroy it and make another one, or go on from a checkpoint in new processes"
            )
        if not dist.is_initialized():
            _initialize(device.type if device is not None else "cpu")
            _ours = True
        _linger_at_exit()
        _open_sessions += 1
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._control = None
        if self.world_size > 1:
            # Of its own, so that what ranks say to each other about errors never meets a collective of the training.
            self._control = dist.new_group(backend="gloo")
        self._beside = None
        self._meetings: Counter[str] = Counter()
        self._closed = False

    def agree(self, value: Any, error: BaseException | None = None) -> list[Any]:
        """Return every rank's value; if any rank brings an error, raise the same one on every rank. Collective."""
        return _agree(self._control, self.world_size, value, error)

    def background(self) -> Agreeing:
        """Return the same ranks, to agree from another thread while this one goes on. Collective."""
        if self.world_size > 1 and self._beside is None:
            self._beside = dist.new_group(backend="gloo")
        return _Beside(self._beside, self.world_size)

    def all_equal(self, number: int) -> bool:
        """Return whether every rank brings the same number, below 2**63. Collective: one all-reduce of 16 bytes."""
        if self._control is None:
            return True
        told = torch.tensor([number, -number])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._control)
        highest, lowest = told.tolist()
        return bool(highest == -lowest)

    def numbers(self, own: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, by rank. Collective: one all-gather of 8 bytes for each."""
        if self._control is None:
            return [list(own)]
        told = [torch.empty(len(own), dtype=torch.float64) for _ in range(self.world_size)]
        dist.all_gather(told, torch.tensor(own, dtype=torch.float64), group=self._control)
        return [numbers.tolist() for numbers in told]

    def meet(self, what: str, seconds: float | None = None) -> None:
        """Wait until every rank is here, at most RENDEZVOUS_SECONDS unless said otherwise. Collective.

        Raises:
            StateError: a rank didn't come: ``what`` was not called on all ranks. The ranks can go on training.
        """
        if self.world_size == 1 or not dist.is_initialized():
            return
        # Through the store, not a collective: a collective that timed out would leave its group unusable.
        store = dist.PrefixStore("shardkit/meet", dist.distributed_c10d._get_default_store())
        keys = [f"{what}/{self._meetings[what]}/{rank}" for rank in range(self.world_size)]
        seconds = RENDEZVOUS_SECONDS if seconds is None else seconds
        store.set(keys[self.rank], "here")
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            store.delete_key(keys[self.rank])
            raise StateError(
                f"{what} is collective: call it on all ranks. Rank {self.rank} waited {seconds:g} s for rank "
                f"{', '.join(missing)} of {self.world_size}"
            ) from None
        self._meetings[what] += 1

    def close(self) -> None:
        """Leave the groups; destroy those that this module made, once nobody uses them."""
        global _open_sessions, _ours
        if self._closed:
            return
        self._closed = True
        _open_sessions -= 1
        if not dist.is_initialized():
            return
        for group in (self._control, self._beside):
            if group is not None:
                dist.destroy_process_group(group)
        self._control = self._beside = None
        if _ours and _open_sessions == 0:
            dist.destroy_process_group()
            _ours = False


class _Beside:
    """The ranks through a group of its own."""

    def __init__(self, group: Any, world_size: int) -> None:
        self._group = group
        self._world_size = world_size

    def agree(self, value: Any, error: BaseException | None = None) -> list[Any]:
        return _agree(self._group, self._world_size, value, error)


def _agree(group: Any, world_size: int, value: Any, error: BaseException | None) -> list[Any]:
    if group is None:
        if error is not None:
            raise error
        return [value]
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, (value, None if error is None else _packed(error)), group=group)
    failed = [(rank, packed) for rank, (_, packed) in enumerate(told) if packed is not None]
    if failed:
        raise _joint_error(failed, world_size, error)
    return [value for value, _ in told]


def expected_world_size() -> int:
    """Return how many ranks there are or will be, from the process group or the launcher's variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 1
    _check_launcher()
    return int(os.environ["WORLD_SIZE"])


def _initialize(device: str) -> None:
    # Each incarnation has its own keys in the launcher's store: those of a group that was closed would mislead it.
    prefix = f"shardkit/{next(_incarnations)}"
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        _check_launcher()
        store, rank, world_size = _launcher_store()
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=dist.PrefixStore(prefix, store), rank=rank, world_size=world_size)


def _check_launcher() -> None:
    """Raise unless the launcher's variables are all there and make sense: half of them would wait or train alone."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise StateError(
            f"{', '.join(name for name in names if name in os.environ)} set without {', '.join(missing)}: start the "
            "program with torchrun or shardkit.launch, or unset them to train in one process"
        )
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise StateError(f"RANK is from 0 to below WORLD_SIZE: RANK={rank} and WORLD_SIZE={world_size} can't be")


@cache
def _launcher_store() -> tuple[dist.Store, int, int]:
    """Return the store that the launcher's variables point to, one connection for the process's life."""
    store, rank, world_size = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"shardkit/{_token(store, rank, world_size)}", store), rank, world_size


def _token(store: dist.Store, rank: int, world_size: int) -> str:
    """Return a token that the ranks have in common, and no rank that was started before had. Collective.

    torchrun has one store for all restarts of a job, with what the killed ranks left in it: their addresses, under the
    same keys. Its count of restarts is no token, since it differs among hosts of which one left and came back.
    """
    own, seconds = secrets.token_hex(8), dist.default_pg_timeout.total_seconds()
    if world_size == 1:
        return own
    seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]
    store = dist.PrefixStore("shardkit/start", store)
    if rank:
        store.set(f"asks/{rank}", own)
        token = store.get(f"told/{own}").decode()
        store.set(f"knows/{token}/{rank}", "")
        return token
    missing, told = list(range(1, world_size)), set()
    deadline = time.monotonic() + seconds
    while missing:
        for other in missing:
            # What it asks may be of a rank that was killed: it is told, and will never know.
            if store.check([f"asks/{other}"]) and (asks := store.get(f"asks/{other}").decode()) not in told:
                store.set(f"told/{asks}", own)
                told.add(asks)
        time.sleep(0.002)
        missing = [other for other in missing if not store.check([f"knows/{own}/{other}"])]
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise StateError(f"rank 0 waited {seconds:g} s for rank {names} of {world_size}")
    return own


@cache
def _linger_at_exit() -> None:
    # Gloo's worker thread drops its last tensor some time after the collective. If the interpreter is finalizing by
    # then, the process aborts (pytorch/pytorch#190489): give the thread its turn while the interpreter is whole.
    atexit.register(time.sleep, 0.2)


def _packed(error: BaseException) -> tuple[str, str]:
    if isinstance(error, ShardkitError):
        return type(error).__name__, str(error)
    # A note says by whom it was raised.
    return "", f"{type(error).__name__}: {error}" + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _joint_error(
    failed: list[tuple[int, tuple[str, str]]], world_size: int, own: BaseException | None
) -> BaseException:
    texts = {text for _, (_, text) in failed}
    if len(failed) == world_size and len(texts) == 1:
        if own is not None and not isinstance(own, ShardkitError):
            return own  # the library's own error, the same on every rank, goes through unchanged
        message = texts.pop()
    else:
        message = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in failed)
    names = {name for _, (name, _) in failed}
    kind = getattr(errors, names.pop(), ShardkitError) if len(names) == 1 else ShardkitError
    joint: BaseException = kind(message)
    joint.__cause__ = own
    return joint


def same_everywhere(facts: list[dict[str, Any]]) -> None:
    """Raise unless all ranks brought the same facts; names the first that differs.

    Raises:
        MismatchError: with what each rank brought.
    """
    for what in {key: None for fact in facts for key in fact}:
        found = [fact.get(what) for fact in facts]
        if all(other == found[0] for other in found):
            continue
        if all(isinstance(other, dict) for other in found):
            # The first entry that differs says more than the whole.
            entries: list[dict[str, Any]] = [dict(other or {}) for other in found]
            keys = {key: None for entry in entries for key in entry}
            key = next(key for key in keys if any(entry.get(key) != entries[0].get(key) for entry in entries))
            what, found = f"{what}, {key}", [entry.get(key) for entry in entries]
        brought = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(found))
        raise MismatchError(f"the ranks bring different things ({what}): {brought}")


def joined(values: Tensor, processes: Processes) -> Tensor:
    """Return the values of all ranks, joined along their first dimension. Collective.

    Raises:
        InputError: they have no dimension, or can't be joined.
    """
    wrong = None
    if not isinstance(values, torch.Tensor) or values.dim() == 0:
        brought = "a 0-dim tensor" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
        wrong = InputError(f"gather takes a tensor of at least one dimension, not {brought}")
    told: list[Tensor] = processes.agree(None if wrong else values.detach().cpu(), wrong)
    if len({(part.dtype, part.shape[1:]) for part in told}) > 1:
        brought = "; ".join(f"rank {rank}: {tuple(part.shape)} of {part.dtype}" for rank, part in enumerate(told))
        raise InputError(f"the ranks' values differ in type, or in more than their first dimension: {brought}")
    return torch.cat(told).to(values.device)
