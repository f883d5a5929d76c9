"""What a run was like, step by step: a trace, in memory and as a file."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import xxhash
from torch import Tensor

from shardkit.checkpoints._layout import Spec, lay_out, memory_of, read_layout
from shardkit.errors import CheckpointError, DamageError, TraceError
from shardkit.parity._sketch import ABSENT, ELEMENTS, SQUARE, SUMS, WIDTH

FORMAT = 1

_ARRAYS = ("losses", "batches", "rates", "applied", "seconds", "gradients", "weights")


@final
@dataclass(frozen=True)
class Trace:
    """A run of S steps on R ranks, with M micro-batches a step at most, over P parameters and G groups of them.

    Where all ranks saw the same to the last bit, ``gradients`` and ``weights`` hold it once: their second dimension is
    1 then, and R elsewhere. A ``sketch`` is 33 numbers, as docs/parity.md tells. A parameter without a gradient in a
    step has -1 for the square of its norm there, and 0 for the rest of the sketch.
    """

    facts: dict[str, Any]
    """What the run was: versions, strategy, seeds, configuration, parameters and their shapes. Plain JSON."""
    losses: Tensor
    """``(S, R, M)``, float64: what ``backward`` was given; NaN where a rank had no such micro-batch."""
    batches: Tensor
    """``(S, R, M)``, int64: fingerprints of what the module was called with; the sum over all micro-batches of all
    ranks is that of the global batch, however it was cut. 0 where there is none."""
    rates: Tensor
    """``(S, G)``, float64: the learning rate of each group, at the step."""
    applied: Tensor
    """``(S,)``, bool: whether the weights moved."""
    seconds: Tensor
    """``(S, R)``, float64: from the end of the step before to the end of this one, without the recording's own."""
    gradients: Tensor
    """``(S, 1 or R, P, WIDTH)``, float64: sketches of the averaged gradients, before clipping."""
    weights: Tensor
    """``(S + 1, 1 or R, P, WIDTH)``, float64: sketches of the weights, before the first step and after each."""
    final_weights: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """The whole weights and buffers at the end."""
    whole_gradients: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """Where asked for: each parameter's averaged gradients, ``(S, *shape)``; NaN where there was none."""

    @property
    def steps(self) -> int:
        return self.losses.shape[0]

    @property
    def ranks(self) -> int:
        return self.losses.shape[1]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters, in the order of the arrays; ``facts`` has their shapes."""
        return list(self.facts["parameters"])

    @property
    def loss(self) -> Tensor:
        """``(S,)``: the mean over all micro-batches of all ranks."""
        return torch.nanmean(self.losses.flatten(1), 1)

    @property
    def data(self) -> Tensor:
        """``(S,)``, int64: the fingerprint of the global batch."""
        return self.batches.flatten(1).sum(1)

    @property
    def gradient_norms(self) -> Tensor:
        """``(S, 1 or R, P)``: of each parameter's gradient; NaN where there was none."""
        return self.gradients[..., SQUARE].sqrt()

    @property
    def gradient_norm(self) -> Tensor:
        """``(S, 1 or R)``: the global L2 norm of the averaged gradient, before clipping."""
        return self.gradients[..., SQUARE].masked_fill(~self.has_gradient, 0.0).sum(-1).sqrt()

    @property
    def has_gradient(self) -> Tensor:
        """``(S, 1 or R, P)``, bool: whether the parameter had a gradient in the step, be it NaN."""
        return self.gradients[..., SQUARE] != ABSENT

    @property
    def weight_norms(self) -> Tensor:
        """``(S + 1, 1 or R, P)``."""
        return self.weights[..., SQUARE].sqrt()

    @property
    def gradient_sums(self) -> Tensor:
        """``(S, 1 or R, P, BUCKETS)``: linear in the gradient; the norm of a difference is about that of this one."""
        return self.gradients[..., SUMS]

    @property
    def weight_sums(self) -> Tensor:
        """``(S + 1, 1 or R, P, BUCKETS)``."""
        return self.weights[..., SUMS]

    @property
    def gradient_samples(self) -> Tensor:
        """``(S, 1 or R, P, SAMPLES)``: elements at the places of ``shardkit.parity._sketch.places``."""
        return self.gradients[..., ELEMENTS]

    @property
    def weight_samples(self) -> Tensor:
        """``(S + 1, 1 or R, P, SAMPLES)``."""
        return self.weights[..., ELEMENTS]

    def save(self, path: str | Path) -> Path:
        """Write the trace as one safetensors file, whole or not at all.

        Raises:
            TraceError: it can't be written.
        """
        path = Path(path)
        tensors = self._tensors()
        metadata = {"shardkit.trace": str(FORMAT), "facts": json.dumps(self.facts, allow_nan=False)}
        metadata["checksum"] = _checksum(metadata["facts"], tensors)
        try:
            layout = lay_out({name: Spec(value.dtype, tuple(value.shape)) for name, value in tensors.items()}, metadata)
        except CheckpointError as error:
            raise TraceError(f"the trace can't be written: {error}") from error
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(layout.header)
                    for name in sorted(tensors, key=layout.places.__getitem__):
                        if tensors[name].numel():
                            file.write(memory_of(tensors[name]))
                os.chmod(draft, 0o666 & ~_umask())
                os.replace(draft, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(draft)
                raise
        except OSError as error:
            raise TraceError(f"trace {str(path)!r} can't be written: {error.strerror}") from error
        return path

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what :meth:`save` wrote.

        Raises:
            TraceError: there is no such file, it is none of a trace, of a newer format, or not what was written.
        """
        path = Path(path)
        try:
            layout = read_layout(path)
            written = path.read_bytes()
        except DamageError as error:
            raise TraceError(str(error)) from error
        except OSError as error:
            raise TraceError(f"trace {str(path)!r} can't be read: {error.strerror}") from error
        metadata = json.loads(layout.header[8:]).get("__metadata__") or {}
        if not isinstance(metadata, dict) or "shardkit.trace" not in metadata:
            raise TraceError(f"{str(path)!r} is no trace: record one with shardkit parity record")
        if metadata["shardkit.trace"] != str(FORMAT):
            raise TraceError(
                f"trace {str(path)!r} is of format {metadata['shardkit.trace']}, and this shardkit reads {FORMAT}: "
                "record it anew, or use the shardkit that wrote it"
            )
        if len(written) != layout.size:
            raise TraceError(f"trace {str(path)!r} is damaged: it has {len(written)} of {layout.size} bytes")
        tensors = {}
        for name, spec in layout.specs.items():
            value = torch.empty(spec.shape, dtype=spec.dtype)
            place = layout.places[name]
            if value.numel():
                memory_of(value)[:] = written[place : place + spec.numel * spec.itemsize]
            tensors[name] = value
        text = metadata.get("facts", "")
        if metadata.get("checksum") != _checksum(text, tensors):
            raise TraceError(f"trace {str(path)!r} is damaged, or was edited: its checksum is not that of its content")
        return cls._of(json.loads(text), tensors, path)

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in _ARRAYS}
        found |= {f"final/{name}": value for name, value in self.final_weights.items()}
        found |= {f"gradient/{name}": value for name, value in self.whole_gradients.items()}
        # Two that share memory, such as tied weights, are each written.
        return {name: value.detach().cpu().contiguous() for name, value in found.items()}

    @classmethod
    def _of(cls, facts: dict[str, Any], tensors: Mapping[str, Tensor], path: Path) -> Trace:
        arrays = {name: tensors.get(name) for name in _ARRAYS}
        missing = [name for name, value in arrays.items() if value is None]
        if missing or arrays["gradients"].shape[-1] != WIDTH:  # type: ignore[union-attr]
            raise TraceError(f"trace {str(path)!r} lacks {', '.join(missing) or 'sketches of the known width'}")
        parts: dict[str, dict[str, Tensor]] = {"final/": {}, "gradient/": {}}
        for name, value in tensors.items():
            for prefix, part in parts.items():
                if name.startswith(prefix):
                    part[name.removeprefix(prefix)] = value
        return cls(facts, **arrays, final_weights=parts["final/"], whole_gradients=parts["gradient/"])  # type: ignore[arg-type]


def _checksum(facts: str, tensors: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128(facts.encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        if value.numel():
            digest.update(memory_of(value))
    return digest.hexdigest()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
