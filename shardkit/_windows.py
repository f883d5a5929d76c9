"""Accumulation windows over a loader: what each rank brings to a step, and what every micro-batch counts in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, final

import torch
from torch.utils.data import RandomSampler

from shardkit._random import get_random_state, set_random_state
from shardkit.errors import InputError, MismatchError, StateError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from shardkit._count import Count
    from shardkit._engine import Engine
    from shardkit._processes import Processes

B = TypeVar("B")

Weight = Callable[[B], "float | int | Tensor"]


@final
class Window(Generic[B]):
    """The micro-batches of one step on this rank; iterate over them.

    Under a strategy whose ranks must all run the module at once, a rank that has fewer of them than others runs its
    last one again: ``filling`` is true meanwhile, and the loss counts nothing.
    """

    def __init__(
        self, batches: list[B], fillers: list[B], weight: float, counts: list[int], training: Training
    ) -> None:
        self.batches = batches
        """What this rank has, each counted once; may be empty."""
        self.weight = weight
        """The sum of the weights of all ranks; without weights the number of micro-batches of all ranks."""
        self.counts = counts
        """How many micro-batches each rank has, by rank."""
        self.filling = False
        """Whether the micro-batch that was taken last counts nothing."""
        self._fillers = fillers
        self._training = training

    def __len__(self) -> int:
        """Return how many micro-batches this rank has of its own."""
        return len(self.batches)

    def __iter__(self) -> Iterator[B]:
        self.filling = False
        yield from self.batches
        self.filling = True
        yield from self._fillers
        self.filling = False
        self._training.taken()


class Training(NamedTuple):
    """What the windows need of the session that they feed."""

    accumulate: int
    backend: str
    engine: Engine
    processes: Processes
    device: torch.device
    place: Count
    taken: Callable[[], None]
    """To be called when all micro-batches of a window were taken."""


@final
class Windows(Generic[B]):
    """The windows of a loader, one pass for each time that it is iterated. Collective: all ranks iterate together.

    ``session.windows`` makes it. ``epoch`` counts complete passes and ``position`` the micro-batches of this pass that
    went into steps on this rank. Both are part of a checkpoint: after ``session.load`` the next pass goes on behind the
    last step, with the order that a shuffling loader had drawn.
    """

    def __init__(
        self,
        loader: Iterable[B],
        weight: Weight[B] | None,
        uneven: Literal["use", "refuse"],
        training: Training,
        state: dict[str, Any] | None,
    ) -> None:
        self.epoch = 0
        self.position = 0
        self._loader = loader
        self._weight = weight
        self._uneven = uneven
        self._training = training
        self._random: dict[str, Any] | None = None
        self._resumed = False
        self._moved: dict[str, Any] = {}
        self._pass = 0
        self._pending = 0
        if state is not None:
            self.load_state_dict(state)

    def __len__(self) -> int:
        """Return how many windows this rank's loader makes in a whole pass, where the loader has a length."""
        return -(-len(self._loader) // self._training.accumulate)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Window[B]]:
        """Start a pass. Collective, as is each of its windows.

        Raises:
            InputError: a weight isn't a number from 0 on, or all weights of a window are 0.
            MismatchError: the ranks have different numbers of micro-batches, and ``uneven`` is ``"refuse"``.
            UnsupportedError: a rank has no micro-batch at all where it must run the module.
            StateError: a window was left before its step.
        """
        self._pass += 1
        turn = self._pass
        if self._training.place.windows not in (None, self):
            raise StateError(
                "a pass over other windows of this session is in progress, and a session has one position: end it, or "
                "join the loaders into one"
            )
        self._training.place.abandon()
        self._training.place.windows = self
        try:
            last: list[B] = []
            batches: Iterator[B] = iter(())
            failure: Exception | None = None
            try:
                batches, last = self._start()
            except Exception as error:
                failure = error
            while True:
                taken, weights, failure = self._take(batches, failure)
                last = taken[-1:] or last
                counts, total = self._exchange(len(taken), math.fsum(weights), bool(last), failure)
                if not any(counts):
                    break
                yield self._window(taken, last, counts, total)
                if turn != self._pass:
                    raise StateError(
                        "this pass over the windows is over: another one was started, or a checkpoint loaded"
                    )
            self.epoch, self.position, self._random = self.epoch + 1, 0, None
        finally:
            if turn == self._pass:
                # Left by a break before anything of the window was used, or at its end.
                self._training.place.abandon()
                self._training.place.windows = None

    def completed(self) -> None:
        """Take note that the window's step was made, or left out for a gradient that isn't finite."""
        self.position, self._pending = self.position + self._pending, 0

    def carried(self) -> dict[str, Any]:
        """Return where windows made in the place of these begin: at a loaded position, or with a new pass."""
        return self.state_dict() if self._resumed else {"epoch": self.epoch, "position": 0, "random": None}

    def state_dict(self) -> dict[str, Any]:
        # Until a pass has begun there, what it is behind is said in the terms of those who wrote the checkpoint.
        moved = self._moved if self._resumed else {"rows": _rows(self._loader), "done": self._is_done()}
        return {"epoch": self.epoch, "position": self.position, "random": self._random, **moved}

    def _is_done(self) -> bool:
        """Return whether this rank's loader has nothing behind the position, where it has a length."""
        return isinstance(self._loader, Sized) and self.position > 0 and self.position >= len(self._loader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self._random = state["epoch"], state["position"], state["random"]
        self._resumed = self._random is not None
        self._moved = {key: state[key] for key in ("ranks", "used", "rows", "unfit") if key in state}
        self._pass += 1

    def _start(self) -> tuple[Iterator[B], list[B]]:
        """Return the loader's batches behind the position, and the last one before it, if there was one."""
        resumed, self._resumed = self._resumed, False
        generators = _generators(self._loader)
        if not resumed or self._random is None:
            self.position = 0
            drawn = [generator.get_state() for generator in generators]
            self._random = {**get_random_state(self._training.device), "generators": drawn}
            return iter(self._loader), []
        _check_replay(self._loader, self.epoch)
        if self.position or self._moved.get("used"):
            size = self._training.processes.world_size
            self.position = _continued(self._loader, self.position, size, **self._moved)
        # A loader that shuffles draws its order when it is started: from the state that it had then.
        now = get_random_state(self._training.device)
        set_random_state(self._random, self._training.device)
        for generator, state in zip(generators, self._random["generators"], strict=False):
            generator.set_state(state)
        batches = iter(self._loader)
        last: list[B] = []
        skipped = 0
        for batch in itertools.islice(batches, self.position):
            last = [batch]
            skipped += 1
        set_random_state(now, self._training.device)
        if skipped < self.position:
            raise InputError(
                f"the checkpoint stands behind {self.position} micro-batches of this pass, and the loader gives only "
                f"{skipped}: it must give the same ones again"
            )
        return batches, last

    def _take(self, batches: Iterator[B], failure: Exception | None) -> tuple[list[B], list[float], Exception | None]:
        """Return the next window's batches and their weights, and what went wrong on this rank."""
        taken: list[B] = []
        weights: list[float] = []
        if failure is not None:
            return taken, weights, failure
        try:
            if not self._training.place.is_between():
                raise StateError(
                    "the next window was asked for before the step of this one: call session.backward(loss) for each "
                    "of its micro-batches, and session.step()"
                )
            for batch in itertools.islice(batches, self._training.accumulate):
                taken.append(batch)
                weights.append(1.0 if self._weight is None else _number(self._weight(batch)))
        except Exception as error:
            return [], [], error
        return taken, weights, None

    def _exchange(
        self, count: int, weight: float, has_batch: bool, failure: Exception | None
    ) -> tuple[list[int], float]:
        """Return each rank's number of micro-batches and the sum of all weights. Collective."""
        told = self._training.processes.numbers([count, weight, has_batch, failure is not None])
        if any(failed for *_, failed in told):
            self._training.processes.agree(None, failure)
        counts = [int(number) for number, *_ in told]
        total = math.fsum(weight for _, weight, *_ in told)
        listed = "; ".join(f"rank {rank}: {number}" for rank, number in enumerate(counts))
        if len(set(counts)) > 1:
            if self._uneven == "refuse":
                raise MismatchError(
                    f"the ranks have different numbers of micro-batches for this window ({listed}), and none of them "
                    'was used: give all ranks the same number, or ask for windows(..., uneven="use")'
                )
            if self._training.engine.lockstep == "forward" and not all(has for _, _, has, _ in told):
                raise UnsupportedError(
                    f"backend {self._training.backend!r} runs the module on all ranks at once, and a rank has no "
                    f"micro-batch at all to run it with ({listed}): give each rank at least one, or use a strategy "
                    "that doesn't shard parameters"
                )
        if any(counts) and not total > 0:
            raise InputError(
                f"all weights of this window are 0, on every rank ({listed} micro-batches): there is nothing to "
                "average over; leave such batches out of the loader"
            )
        return counts, total

    def _window(self, taken: list[B], last: list[B], counts: list[int], total: float) -> Window[B]:
        most = max(counts)
        fillers: list[B] = []
        passes = max(len(taken), 1)
        if self._training.engine.lockstep == "backward":
            passes = most
        elif self._training.engine.lockstep == "forward":
            fillers, passes = last * (most - len(taken)), most
        self._pending = len(taken)
        # The engine averages over ranks: times their number it is the sum.
        self._training.place.begin(len(taken), len(taken) + len(fillers), passes, len(counts) / total)
        return Window(taken, fillers, total, counts, self._training)


def moved(states: list[dict[str, Any] | None], rank: int, world_size: int) -> dict[str, Any] | None:
    """Return where this rank begins, from where each of the ranks stood that wrote a checkpoint.

    With another number of ranks each takes up an equal part of what all had used, as loaders give it that deal out one
    sequence in turn.
    """
    if not states:
        return None
    if len(states) == world_size or any(state is None for state in states):
        return states[rank] if len(states) == world_size else None
    known = [state for state in states if state is not None]
    if all(state.get("done") for state in known):
        # Of a pass that is over, a short last batch included, there is nothing to deal out.
        return {"epoch": max(state["epoch"] for state in known) + 1, "position": 0, "random": None}
    # Where it was loaded and saved again, before a pass: what the first ones had used.
    used = known[0].get("used", sum(state["position"] for state in known))
    found = {"ranks": len(known), **known[rank % len(known)], "position": used // world_size, "used": used}
    if len({(state["epoch"], state["position"], state.get("rows")) for state in known}) > 1:
        positions = ", ".join(str(state["position"]) for state in known)
        found["unfit"] = (
            f"the checkpoint's {len(known)} ranks had used {positions} micro-batches of this pass, and only equal "
            f"numbers can be taken up by {world_size} ranks: {_ANEW}"
        )
    return found


_ANEW = "load it with position=False to begin the pass anew, or load one that was saved between passes"


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the random generators of a DataLoader's own, each once."""
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    held = (getattr(part, "generator", None) for part in (loader, sampler, inner))
    return list({id(item): item for item in held if isinstance(item, torch.Generator)}.values())


def _check_replay(loader: Any, epoch: int) -> None:
    """Raise where a DataLoader can't draw again what it drew.

    Raises:
        InputError: it keeps its workers, and so draws its order behind the workers' seeds in its first pass only.
    """
    sampler = getattr(loader, "sampler", None)
    shared = getattr(sampler, "generator", 0) in (None, getattr(loader, "generator", None))
    if epoch and getattr(loader, "persistent_workers", False) and shared:
        raise InputError(
            "a DataLoader with persistent_workers=True doesn't draw the same order again in the midst of a later pass: "
            "give its sampler a generator of its own, as in RandomSampler(data, generator=torch.Generator())"
        )


def _rows(loader: Any) -> int | None:
    """Return how many samples a DataLoader puts into a micro-batch, where that is known."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _continued(
    loader: Any,
    position: int,
    world_size: int,
    ranks: int | None = None,
    used: int | None = None,
    rows: int | None = None,
    unfit: str | None = None,
) -> int:
    """Return behind how many of its loader's micro-batches a rank goes on.

    ``used`` is how many micro-batches, of ``rows`` samples each, other ``ranks`` had used together; with None this
    rank had used ``position`` of them.

    Raises:
        InputError: what was used can't be dealt out in equal parts, or each rank had drawn an order of its own.
    """
    if unfit is not None:
        raise InputError(unfit)
    if ranks is not None and isinstance(getattr(loader, "sampler", None), RandomSampler):
        raise InputError(
            f"each of the checkpoint's {ranks} ranks shuffled the data by itself, so that another number of ranks "
            "can't tell what was used: give the loader a DistributedSampler, or load with position=False to begin the "
            "pass anew"
        )
    share, before = (1, position) if used is None else (world_size, used)
    own = _rows(loader)
    if ranks is not None and (rows is None or own is None):
        raise InputError(
            f"the checkpoint's {ranks} ranks had used {before} micro-batches of this pass, and how many samples those "
            f"are can't be told, since the loader has no batch_size: {_ANEW}"
        )
    if rows is None or own is None:
        # On as many ranks a loader of another kind is taken to give the same as it did.
        rows = own = 1
    if before * rows % (share * own):
        who = "this rank" if ranks is None else f"the checkpoint's {ranks} ranks"
        raise InputError(
            f"{who} had used {before} micro-batches of this pass"
            + (f", of {rows} samples each" if own > 1 or rows > 1 else "")
            + f", which {share} ranks can't take up in equal parts"
            + (f" of {own}" if own > 1 or rows > 1 else "")
            + f": {_ANEW}"
        )
    return before * rows // (share * own)


def _number(weight: float | int | Tensor) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"the weight of a micro-batch is one number, not {weight!r}") from error
    if not (number >= 0 and math.isfinite(number)):
        raise InputError(f"the weight of a micro-batch is finite and at least 0, not {number}")
    return number
