"""The keys of a DeepSpeed JSON file that arguments say too: filled from them, and held against them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from shardkit.errors import StrategyError
from shardkit.transformers._deepspeed_schedule import PARAMS, REQUIRED

AUTO = "auto"

_ADAM = ("adam", "adamw")
_OPTIM = {
    **dict.fromkeys(_ADAM, ("adamw_torch", "adamw_torch_fused")),
    "sgd": ("adamw_torch_fused", "sgd"),
    "adagrad": ("adamw_torch_fused", "adagrad"),
}
"""Values of ``--optim`` that go with a type of the file: its own, and the default, which nobody has to have given."""

_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupCosineLR": "cosine"}
"""Values of ``--lr_scheduler_type`` that go with a type of the file, beside ``linear``, the default."""


class Contradictions:
    """Where a file contradicts the arguments: lines of one error."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, key: str, value: Any, why: str) -> None:
        self.lines.append(f"\n  {key}: {value!r}, but {why}")

    def refuse(self, source: str) -> None:
        """Raise what was found.

        Raises:
            StrategyError: there is something.
        """
        if self.lines:
            raise StrategyError(
                f"--deepspeed {source} contradicts other arguments, or can't be followed:{''.join(self.lines)}\n"
                '  where an argument says the same, write "auto" in the file, or the same value in both'
            )


def left(value: Any) -> bool:
    """Return whether the file leaves a value to the arguments."""
    return value is None or value == AUTO


def table(config: dict[str, Any], key: str, found: Contradictions) -> dict[str, Any] | None:
    """Return a section of the file; None where there is none."""
    section = config.get(key)
    if section is None:
        return None
    if not isinstance(section, dict):
        found.add(key, section, "it is a table of settings")
        return None
    return section


def hold(section: dict[str, Any], key: str, meant: Any, flag: str, found: Contradictions, where: str = "") -> None:
    """Fill a value from an argument, or hold it against it."""
    if left(section.get(key)):
        section[key] = meant
    elif not _same(section[key], meant):
        found.add(f"{where}{key}", section[key], f"{flag} {meant!r}")


def _same(value: Any, meant: Any) -> bool:
    if isinstance(value, bool) or isinstance(meant, bool):
        return value is meant
    if isinstance(value, list) and isinstance(meant, list):
        return len(value) == len(meant) and all(map(_same, value, meant))
    return isinstance(value, int | float) and bool(value == meant)


def take_sizes(config: dict[str, Any], args: Any, found: Contradictions) -> None:
    """Take out what the strategy says for every backend: batch size, accumulation, clipping."""
    micro, window, ranks = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    sizes = {"train_batch_size": config.pop("train_batch_size", None)}
    if args.auto_find_batch_size:
        # They are what is looked for.
        config.pop("train_micro_batch_size_per_gpu", None)
    else:
        flag = "--per_device_train_batch_size is"
        hold(config, "train_micro_batch_size_per_gpu", micro, flag, found)
        flag = f"{ranks} processes x --per_device_train_batch_size {micro} x --gradient_accumulation_steps {window} are"
        hold(sizes, "train_batch_size", ranks * micro * window, flag, found)
    hold(config, "gradient_accumulation_steps", window, "--gradient_accumulation_steps is", found)
    hold(config, "gradient_clipping", args.max_grad_norm or 0.0, "--max_grad_norm is", found)
    del config["gradient_accumulation_steps"], config["gradient_clipping"]


def translate_offload(config: dict[str, Any], found: Contradictions) -> None:
    """Write offload of the older form, which is a truth value, as the tables of today."""
    section = config.get("zero_optimization")
    if not isinstance(section, dict):
        return
    for old, new in _OFFLOADS.items():
        if not isinstance(section.get(old), bool):
            continue
        asked = section.pop(old)
        table = section.get(new)
        if asked and left(table):
            section[new] = {"device": "cpu"}
        elif isinstance(table, dict) and (table.get("device") == "cpu") != asked:
            found.add(f"zero_optimization.{old}", asked, f"zero_optimization.{new} is {table!r}: take one of them out")


_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}


def fill_precision(config: dict[str, Any], args: Any, found: Contradictions) -> None:
    """Write which section is on: that of half-precision weights, or ``torch_autocast``, whose weights are float32.

    A section that is absent or "auto" says what the arguments do, as to DeepSpeed half-precision weights. At stage 0,
    where DeepSpeed would add up their gradients in half precision, they are float32.
    """
    if "bfloat16" in config and "bf16" not in config:
        config["bf16"] = config.pop("bfloat16")
    precision = "fp16" if args.fp16 else "bf16" if args.bf16 else None
    autocast = _fill_autocast(config, precision, found)
    zero = config.get("zero_optimization")
    sharded = isinstance(zero, dict) and zero.get("stage") not in (None, AUTO, 0)
    for key in ("fp16", "bf16"):
        if config.get(key) == AUTO:
            config[key] = {}
        section = table(config, key, found)
        asked = key == precision
        if section is None:
            if key not in config and asked and sharded and not autocast:
                config[key] = {"enabled": True}
            continue
        value = section.get("enabled")
        if left(value):
            section["enabled"] = asked and sharded and not autocast
        elif value and not asked:
            found.add(f"{key}.enabled", value, f"--{key} isn't given")
        elif not value and asked and not autocast:
            why = f'--{key} is given: for float32 weights write "torch_autocast": {{"enabled": true}}'
            found.add(f"{key}.enabled", value, why)


def _fill_autocast(config: dict[str, Any], precision: str | None, found: Contradictions) -> bool:
    """Return whether ``torch_autocast`` is on."""
    section = table(config, "torch_autocast", found)
    if section is None:
        return False
    if left(section.get("enabled")):
        section["enabled"] = precision is not None
    if not section["enabled"]:
        return False
    if precision is None:
        found.add("torch_autocast.enabled", section["enabled"], "neither --fp16 nor --bf16 is given")
        return True
    meant = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    if left(section.get("dtype")):
        section["dtype"] = meant
    elif str(section["dtype"]).removeprefix("torch.") != meant:
        found.add("torch_autocast.dtype", section["dtype"], f"--{precision} is given, which is {meant!r}")
    return True


def translate_scale(config: dict[str, Any], args: Any, found: Contradictions) -> tuple[dict[str, Any], str]:
    """Take the loss scale out of the section ``fp16``: return fields of the strategy, and what to warn of."""
    section = config.get("fp16")
    if not isinstance(section, dict):
        return {}, ""
    fields: dict[str, Any] = {}
    power, window = section.pop("initial_scale_power", None), section.pop("loss_scale_window", None)
    if not left(power):
        if isinstance(power, bool) or not isinstance(power, int | float) or not 0 <= power < 128:
            found.add("fp16.initial_scale_power", power, "it is a number from 0 on, of which 2 is raised to the power")
        else:
            fields["loss_scale"] = 2.0**power
    if not left(window):
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            found.add("fp16.loss_scale_window", window, "it is a number of steps from 1 on")
        else:
            fields["loss_scale_window"] = window
    hysteresis = section.pop("hysteresis", None)
    told = ""
    if not left(hysteresis) and (isinstance(hysteresis, bool) or not isinstance(hysteresis, int) or hysteresis < 1):
        found.add("fp16.hysteresis", hysteresis, "it is a number of overflows from 1 on")
    elif args.fp16 and not left(hysteresis) and hysteresis != 1:
        told = f"fp16.hysteresis {hysteresis} is read as 1: the loss scale halves at each overflow"
    return (fields if args.fp16 else {}), told


def fill_optimizer(config: dict[str, Any], args: Any, found: Contradictions) -> None:
    """Fill the settings of the section ``optimizer``, as a new table."""
    section = table(config, "optimizer", found)
    if section is None:
        return
    kind = str(section.get("type")).lower()
    given = section.get("params")
    params = {} if left(given) else given
    if not isinstance(params, dict):
        found.add("optimizer.params", params, "it is a table of settings")
        return
    params = dict(params)
    where = "optimizer.params."
    hold(params, "lr", args.learning_rate, "--learning_rate is", found, where)
    hold(params, "weight_decay", args.weight_decay, "--weight_decay is", found, where)
    betas = [args.adam_beta1, args.adam_beta2]
    for key, meant, flag in (
        ("betas", betas, "--adam_beta1 and --adam_beta2 are"),
        ("eps", args.adam_epsilon, "--adam_epsilon is"),
    ):
        if kind in _ADAM or params.get(key) == AUTO:
            hold(params, key, meant, flag, found, where)
    optim = getattr(args.optim, "value", args.optim)
    if kind in _OPTIM and optim not in _OPTIM[kind]:
        found.add("optimizer.type", section["type"], f"--optim is {optim!r}: take one of them out")
    if args.optim_args:
        found.add("optimizer.params", given, f"--optim_args is {args.optim_args!r}: write all in one of them")
    config["optimizer"] = {**section, "params": params}


def fill_scheduler(config: dict[str, Any], args: Any, steps: int | None, found: Contradictions) -> dict[str, Any]:
    """Return the settings of the section ``scheduler``, filled; those of the number of steps where that is known."""
    section = table(config, "scheduler", found)
    if section is None:
        return {}
    kind = section.get("type")
    for key in section:
        if key not in ("type", "params"):
            found.add(f"scheduler.{key}", section[key], "the section has 'type' and 'params'")
    if kind not in PARAMS:
        found.add("scheduler.type", kind, f"shardkit builds {', '.join(PARAMS)}: take the section out")
        return {}
    given = section.get("params")
    params = {} if left(given) else given
    if not isinstance(params, dict):
        found.add("scheduler.params", params, "it is a table of settings")
        return {}
    params = dict(params)
    _fill_rates(kind, params, args, steps, found)
    _check_params(kind, params, steps, found)
    named = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if named not in ("linear", _SCHEDULES.get(kind)):
        found.add("scheduler.type", kind, f"--lr_scheduler_type is {named!r}: take one of them out")
    if args.lr_scheduler_kwargs:
        found.add("scheduler.type", kind, f"--lr_scheduler_kwargs is {args.lr_scheduler_kwargs!r}: take one out")
    return params


def _fill_rates(kind: str, params: dict[str, Any], args: Any, steps: int | None, found: Contradictions) -> None:
    known, where = PARAMS[kind], "scheduler.params."
    if "warmup_min_lr" in known and left(params.get("warmup_min_lr")):
        params["warmup_min_lr"] = 0.0
    if "warmup_max_lr" in known:
        hold(params, "warmup_max_lr", args.learning_rate, "--learning_rate is", found, where)
    whole = args.warmup_steps >= 1 or args.warmup_steps == 0
    if "warmup_num_steps" not in known:
        if args.warmup_steps:
            why = f"--warmup_steps is {args.warmup_steps:g}, and it has no warm-up: leave the argument out"
            found.add("scheduler.type", kind, why)
    elif steps is not None or whole:
        warmup = args.get_warmup_steps(steps or 0)
        if not warmup and params.get("warmup_num_steps") in (0, 1):
            params["warmup_num_steps"] = 0
        hold(params, "warmup_num_steps", warmup, "--warmup_steps is", found, where)
        # DeepSpeed refuses 0, and reads 1 as 2.
        if params["warmup_num_steps"] == 0:
            params["warmup_num_steps"] = 1
    if "total_num_steps" in known and steps is not None:
        hold(params, "total_num_steps", steps, "the number of steps is", found, where)


def _check_params(kind: str, params: dict[str, Any], steps: int | None, found: Contradictions) -> None:
    where = "scheduler.params."
    for key, value in params.items():
        if key not in PARAMS[kind]:
            found.add(f"{where}{key}", value, f"{kind} has no such setting{_nearest(key, PARAMS[kind])}")
        elif value == AUTO and (steps is not None or key not in ("warmup_num_steps", "total_num_steps")):
            found.add(f"{where}{key}", value, "no argument says it: write a value")
    for key in REQUIRED.get(kind, ()):
        if params.get(key) is None:
            found.add(f"{where}{key}", None, f"{kind} needs it, and no argument says it: write a value")
    if params.get("warmup_type", "log") not in ("log", "linear"):
        found.add(f"{where}warmup_type", params["warmup_type"], "it is 'log' or 'linear'")


def _nearest(key: str, known: Iterable[str]) -> str:
    near = get_close_matches(key, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
