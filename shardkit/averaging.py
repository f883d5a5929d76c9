"""Averaging gradients over the ranks while a backward pass runs: torch's reducer, told of the pass by its loss."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardkit._footprint import ParameterSize

LARGE_BUCKET = 4 * 2**20
"""Bytes from which on a bucket is given up between windows. To get memory from the kernel anew takes time: a
smaller bucket isn't worth it."""


@final
class Reducer:
    """DistributedDataParallel's reducer, over those parameters that are trainable when it is built. Collective.

    The user calls the module itself and never a wrapper: the reducer is told of a backward pass when the pass begins,
    with its loss. So it finds unused parameters in the very graph that is back-propagated, whatever the module returned
    and however often it was called, and a micro-batch that isn't the window's last needs no ``no_sync``.

    By itself it holds buckets as large as all gradients for ever, which nobody needs during a forward, where the
    activations come on top. Here the memory of a large bucket is given up by :meth:`drop`, and is back when
    the first of its gradients comes, where activations have gone already. To give it up the gradients must be
    views of the buckets.
    """

    def __init__(
        self, model: nn.Module, *, bucket_cap_mb: float | None = None, gradient_as_bucket_view: bool = True
    ) -> None:
        self.parameters: list[Tensor] = [value for value in model.parameters() if value.requires_grad]
        self.wrapper: DistributedDataParallel | None = None
        self._buckets: list[_Bucket] | None = []
        if not self.parameters:
            return
        self.wrapper = DistributedDataParallel(
            model,
            init_sync=False,  # the core has broadcast the weights, and keeps buffers equal
            find_unused_parameters=True,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        sparse = any(getattr(part, "sparse", False) is True for part in model.modules())
        size = sum(value.nbytes for value in self.parameters)
        if gradient_as_bucket_view and not sparse and size >= LARGE_BUCKET:
            # Where they are is seen once gradients are views of them.
            self._buckets = None

    def backward(self, loss: Tensor, gradient: Tensor) -> None:
        """Run a window's last backward pass, and average what it and those before it left. Collective."""
        if self.wrapper is None:
            loss.backward(gradient)
        else:
            # The reducer begins with the first parameter that back-propagation reaches. A loss that depends on none,
            # where a rank found nothing to learn from, would leave the other ranks waiting for this one.
            first = next((value for value in self.parameters if value.requires_grad), None)
            self._run(loss, gradient, () if first is None else (first,))

    def drop(self) -> None:
        """Drop the gradients, and give up the memory of large buckets until the next backward pass. Collective."""
        for bucket in self._buckets or ():
            bucket.note()
        for value in self.parameters:
            value.grad = None
        if self._buckets is None:
            self._look()
        for bucket in self._buckets or ():
            bucket.release()

    def close(self) -> None:
        """Let go of the module. The reducer's hooks on the parameters go, too."""
        for bucket in self._buckets or ():
            bucket.close()
        if self.wrapper is not None:
            # Some may be in the midst of a pass that failed.
            self.wrapper.reducer._remove_autograd_hooks()
        self._buckets, self.wrapper = [], None

    def _run(self, loss: Tensor, gradient: Tensor, reached: Sequence[Tensor]) -> None:
        buckets = self._buckets or ()
        for bucket in buckets:
            bucket.wanted = True
        try:
            self._expect(self._started(loss, reached)).backward(gradient)
        except BaseException:
            # The reducer is in the midst of its work, and may go on with it in any pass.
            for bucket in buckets:
                bucket.restore()
            raise

    def _started(self, loss: Tensor, reached: Sequence[Tensor]) -> Tensor:
        with torch.enable_grad():
            started: Tensor = _Start.apply(loss, self, *reached)  # type: ignore[no-untyped-call]
        return started

    def _expect(self, loss: Tensor) -> Tensor:
        """Tell the reducer that a backward pass from this loss begins."""
        assert self.wrapper is not None
        self.wrapper.reducer.prepare_for_forward()
        if _Quietly.done:
            self.wrapper.reducer.prepare_for_backward([loss])
        else:
            _Quietly.apply(self.wrapper.reducer, loss)
        return loss

    def _starts(self) -> None:
        # Before all else of the pass: the reducer writes zeros for all parameters that the pass won't reach when
        # it meets the first that it does.
        for bucket in self._buckets or ():
            if bucket.released and not bucket.all_run():
                bucket.restore()

    def _look(self) -> None:
        """Find the buckets by averaging zeros. Collective."""
        self._buckets = []
        if not all(value.requires_grad for value in self.parameters):
            return  # one is frozen by now: without it the reducer doesn't come to its end
        device = self.parameters[0].device
        with torch.enable_grad():
            # Not a pass through the parameters: those who have put hooks on them aren't to see it.
            self._expect(self._started(torch.zeros((), device=device), self.parameters))
            start = torch.zeros((), device=device, requires_grad=True)
            _Look.apply(start, self).backward()  # type: ignore[no-untyped-call]
        self._learn()
        for value in self.parameters:
            value.grad = None

    def _learn(self) -> None:
        assert self._buckets is not None
        found: dict[int, _Bucket] = {}
        for value in self.parameters:
            assert value.grad is not None
            storage = value.grad.untyped_storage()
            if storage.nbytes() >= LARGE_BUCKET:
                found.setdefault(storage._cdata, _Bucket(storage)).add(value)
        self._buckets += found.values()
        del storage
        for bucket in self._buckets:
            bucket.learned()


@final
class ReducerFootprint:
    """What gradients and buckets under a :class:`Reducer` hold while a window passes, for a plugin's footprint.

    ``buffers`` are the bytes of buckets that are held all the time, and ``gradients`` those of gradients and of buckets
    that are held while they come.
    """

    def __init__(
        self,
        parameters: Iterable[ParameterSize],
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        trainable = [value for value in parameters if value.trainable]
        released = gradient_as_bucket_view and sum(value.nbytes for value in trainable) >= LARGE_BUCKET
        self._views = gradient_as_bucket_view
        self._large: dict[str, int] = {}
        self._sizes: list[int] = []
        self.buffers = self.gradients = 0
        for bucket in _assigned(trainable, bucket_cap_mb):
            size = sum(value.nbytes for value in bucket)
            if released and size >= LARGE_BUCKET:
                self._large.update((value.name, len(self._sizes)) for value in bucket)
                self._sizes.append(size)
            else:
                self.buffers += size
        self.most = self.buffers + sum(self._sizes)
        """The bytes of all buckets."""
        self._kept: dict[str, int] = {}
        self._back: set[int] = set()

    def ready(self, name: str, nbytes: int, *, last: bool) -> int:
        """Follow a gradient: see :meth:`shardkit.Footprint.ready`."""
        size = self._kept[name] = self._kept.get(name, 0) + nbytes
        self.gradients += nbytes
        if not last or not self._views:
            return 0
        # Copied into its bucket, and then dropped.
        self.gradients -= self._kept.pop(name)
        place = self._large.get(name)
        if place is not None and place not in self._back:
            self._back.add(place)
            self.gradients += self._sizes[place]
        return size

    def drop(self) -> None:
        """The gradients are dropped."""
        self.gradients = 0
        self._kept.clear()
        self._back.clear()


def _assigned(parameters: Sequence[ParameterSize], bucket_cap_mb: float | None) -> list[list[ParameterSize]]:
    """Return which parameters share a bucket, as torch has it: a full one is closed, a first one of 1 MiB at that."""
    first, cap = (2**20, 25 * 2**20) if bucket_cap_mb is None else (int(bucket_cap_mb * 2**20),) * 2
    found: list[list[ParameterSize]] = []
    # One of each dtype is filled, which the size of an element stands for.
    filling: dict[int, list[ParameterSize]] = {}
    room: dict[int, int] = {}
    for value in parameters:
        filling.setdefault(value.itemsize, []).append(value)
        room[value.itemsize] = room.get(value.itemsize, min(first, cap)) - value.nbytes
        if room[value.itemsize] <= 0:
            room[value.itemsize] = cap
            found.append(filling.pop(value.itemsize))
    return found + list(filling.values())


class _Bucket:
    """One of the reducer's buckets: its memory, and what has a view of it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._size = storage.nbytes()
        self._parameters: list[Tensor] = []
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._holders = 0
        self._alone = True
        self.released = self.wanted = False

    def add(self, value: Tensor) -> None:
        node: Any = get_gradient_edge(value).node
        self._parameters.append(value)
        self._nodes.append(node)
        # The node would hold on to the bucket, and the bucket to the node.
        self._handles.append(node.register_prehook(partial(_arrives, weakref.ref(self))))

    def learned(self) -> None:
        self._holders = _holders(self._storage)

    def all_run(self) -> bool:
        """Return whether the backward pass that is running will reach all parameters."""
        return all(map(torch._C._will_engine_execute_node, self._nodes))

    def note(self) -> None:
        # A view of a gradient counts as one more of the storage, and the gradient itself by its references.
        self._alone = _holders(self._storage) == self._holders and not any(map(_is_held, self._parameters))

    def release(self) -> None:
        self.wanted = False
        if self._alone and not self.released:
            self._storage.resize_(0)
            self.released = True

    def restore(self) -> None:
        if self.released:
            self._storage.resize_(self._size)
            self.released = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def _is_held(value: Tensor) -> bool:
    """Return whether someone has kept a reference to the gradient."""
    return value.grad is not None and sys.getrefcount(value.grad) > _UNHELD


def _references() -> int:
    value = torch.zeros(1, requires_grad=True)
    value.sum().backward()
    return sys.getrefcount(value.grad)


_UNHELD = _references()


def _arrives(reference: weakref.ref[_Bucket], _: Any) -> None:
    bucket = reference()
    if bucket is not None and bucket.wanted:
        bucket.restore()


class _Start(torch.autograd.Function):
    """Leaves a loss as it is, and puts parameters into its graph that get no gradient from there."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, reducer: Reducer, *reached: Tensor) -> Tensor:
        ctx.reducer, ctx.nones = reducer, (None,) * (1 + len(reached))
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.reducer._starts()
        return gradient, *ctx.nones


class _Look(torch.autograd.Function):
    """Has the reducer average zeros for all parameters. It does so only within a backward pass."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, reducer: Reducer) -> Tensor:
        ctx.reducer = reducer
        return start.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for place, value in enumerate(ctx.reducer.parameters):
            value.grad = torch.zeros_like(value)
            ctx.reducer.wrapper.reducer._autograd_hook(place)
        return gradient, None


class _Quietly(torch.autograd.Function):
    """Has the reducer look for unused parameters without a word, until it has said its word.

    Torch says once per process that the search costs time where all parameters are used. It is what makes a model right
    that uses some on some ranks only, and takes microseconds. The word comes from C++, and only within a call such as
    that of an autograd function does torch turn it into a Python warning, which can be filtered.
    """

    done = False

    @classmethod
    def apply(cls, reducer: Any, loss: Tensor) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().apply(reducer, loss)  # type: ignore[no-untyped-call]
        for warning in caught:
            if "find_unused_parameters=True was specified" in str(warning.message):
                cls.done = True
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    @staticmethod
    def forward(ctx: Any, reducer: Any, loss: Tensor) -> None:
        reducer.prepare_for_backward([loss])
