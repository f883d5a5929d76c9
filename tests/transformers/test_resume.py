"""Checkpoints of the Trainer: to the same bits, under another flag, with other numbers of ranks, of other libraries."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardkit import testing
from shardkit._prepare import overriding
from tests.transformers import tiny

with contextlib.suppress(ImportError):
    import transformers

    import shardkit.transformers

SHARDED: dict[str, Any] = {"sharded_ddp": "simple"}
DDP: dict[str, Any] = {"strategy": "ddp"}
ZERO: dict[str, Any] = {"strategy": "zero"}
FSDP: dict[str, Any] = {"strategy": "fsdp"}
STAGE1: dict[str, Any] = {"strategy": "deepspeed:stage=1"}
STAGE2: dict[str, Any] = {"strategy": "deepspeed:stage=2"}
STAGE3: dict[str, Any] = {"strategy": "deepspeed:stage=3"}
HALF: dict[str, Any] = {"strategy": "deepspeed:stage=2,half_weights=true", "bf16": True}
EACH = {"save_strategy": "steps", "save_steps": 1}

LOSS = 1e-6
"""Relative, in float32: sums of ranks in another order."""


def flag(arguments: dict[str, Any], slow: bool = False) -> Any:
    """Return a parameter of tests, with a name."""
    name = " ".join(f"{key} {value}" for key, value in arguments.items())
    return pytest.param(arguments, id=name, marks=[pytest.mark.slow] if slow else [])


# What runs on the ranks.


def train(folder: str, arguments: dict[str, Any], resume: Any = None, *, own: bool = False) -> tiny.Training:
    """Train on samples that divide evenly among ranks, and evaluate, or go on from a checkpoint."""
    return tiny.trained(trainer(folder, arguments, own=own), resume)


def trainer(folder: str, arguments: dict[str, Any], *, own: bool = False) -> Any:
    settings = {"model": "gpt2", **arguments}
    words = settings.pop("words", None)
    made = tiny.trainer(transformers if own else shardkit.transformers, folder, **settings)
    made.train_dataset = tiny.samples(24)
    if words is not None:
        made.model.resize_token_embeddings(words)
    return made


def told_by(action: Any) -> list[str]:
    """Return what an action warns of in the log."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardkit.transformers._checkpoints")
    logger.addHandler(handler)
    try:
        action()
    finally:
        logger.removeHandler(handler)
    return found


def refusal(action: Any) -> str:
    """Return the words with which an action is refused."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# To the same bits.


@dataclass
class End:
    """Where a training stands when it has ended."""

    seen: tiny.Training
    random: list[Any]
    scaler: dict[str, Any] | None


def _interrupted(folder: str, arguments: dict[str, Any]) -> tuple[End, dict[str, End]]:
    def end(kwargs: dict[str, Any], resume: Any = None) -> End:
        made = tiny.trainer(shardkit.transformers, folder, **kwargs)
        for part in made.model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.1
        seen = tiny.trained(made, resume)
        drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
        return End(seen, drawn, None if made.session.scaler is None else made.session.scaler.state_dict())

    whole, resumed = end({**arguments, **EACH}), {}
    for name, step in (("between epochs", 3), ("in mid-epoch", 2)):
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)
        resumed[name] = end(arguments, f"{folder}/checkpoint-{step}")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint-6")
    dist.barrier()
    resumed["the last one"] = end(arguments, True)
    return whole, resumed


@pytest.mark.parametrize(
    "arguments",
    [
        flag({**DDP, "model": "gpt2"}, slow=True),
        flag({**SHARDED, "model": "t5"}),
        flag({**FSDP, "model": "gpt2", "fp16": True}),
        flag({**STAGE3, "model": "t5"}),
        flag({**HALF, "model": "gpt2"}),
        flag({**ZERO, "model": "t5"}, slow=True),
        flag({**DDP, "model": "t5", "fp16": True}, slow=True),
        flag({**FSDP, "model": "t5"}, slow=True),
        flag({**STAGE1, "model": "t5"}, slow=True),
        flag({**STAGE2, "model": "gpt2"}, slow=True),
        flag({**HALF, "model": "t5"}, slow=True),
        flag({"strategy": "deepspeed:stage=3,half_weights=true", "bf16": True, "model": "gpt2"}, slow=True),
    ],
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    for whole, resumed in testing.run(_interrupted, str(tmp_path), arguments):
        assert len(whole.seen.losses) == 6
        for place, end in resumed.items():
            assert end.seen.losses == whole.seen.losses, place
            np.testing.assert_array_equal(end.seen.norms, whole.seen.norms, place)  # NaN where a step was left out
            assert end.seen.rates == whole.seen.rates, place
            assert end.random == whole.random, place
            assert end.scaler == whole.scaler, place
            assert end.seen.metrics["eval_loss"] == whole.seen.metrics["eval_loss"], place
            for name, value in whole.seen.weights.items():
                assert torch.equal(end.seen.weights[name], value), f"{place}: {name}"


# Under another flag, with another number of ranks.


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny.Training, Path]:
    """A training by the library's own Trainer under plain DDP on 2 ranks, and its checkpoints."""
    folder = tmp_path_factory.mktemp("own")
    return testing.run(partial(train, own=True), str(folder), EACH)[0], folder


def assert_goes_on(seen: tiny.Training, expected: tiny.Training) -> None:
    torch.testing.assert_close(seen.losses, expected.losses, rtol=LOSS, atol=0)
    torch.testing.assert_close(seen.norms, expected.norms, rtol=LOSS, atol=0)
    assert seen.rates == expected.rates


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (SHARDED, STAGE2),
        (STAGE2, SHARDED),
        (STAGE3, FSDP),
        pytest.param(FSDP, STAGE3, marks=pytest.mark.slow),
        pytest.param(FSDP, ZERO, marks=pytest.mark.slow),
        pytest.param(STAGE3, DDP, marks=pytest.mark.slow),
        pytest.param(DDP, STAGE1, marks=pytest.mark.slow),
    ],
)
def test_losses_go_on_under_another_flag(
    written: dict[str, Any], read: dict[str, Any], reference: tuple[tiny.Training, Path], tmp_path: Path
) -> None:
    testing.run(train, str(tmp_path), {**written, **EACH})
    for seen in testing.run(train, str(tmp_path), read, str(tmp_path / "checkpoint-2")):
        assert_goes_on(seen, reference[0])


@pytest.mark.parametrize(
    ("read", "ranks"),
    [
        (FSDP, 1),
        (STAGE3, 3),
        pytest.param(STAGE3, 1, marks=pytest.mark.slow),
        pytest.param(SHARDED, 3, marks=pytest.mark.slow),
        pytest.param(DDP, 1, marks=pytest.mark.slow),
    ],
)
def test_losses_go_on_with_another_number_of_ranks_and_the_same_global_batch(
    read: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    batch = 12
    expected = testing.run(train, str(tmp_path), {**SHARDED, **EACH, "per_device_train_batch_size": 3})[0]
    same = {**read, "per_device_train_batch_size": batch // 2 // ranks}
    # Of four steps, two in each epoch.
    for seen in testing.run(train, str(tmp_path), same, str(tmp_path / "checkpoint-1"), processes=ranks):
        assert len(seen.losses) == 4
        assert_goes_on(seen, expected)


def _warned(folder: str, checkpoint: str) -> list[str]:
    made = trainer(folder, {**DDP, "gradient_accumulation_steps": 1, "max_steps": 1})
    return told_by(lambda: made.train(resume_from_checkpoint=checkpoint))


def test_another_global_batch_is_warned_of(tmp_path: Path) -> None:
    testing.run(train, str(tmp_path), {**DDP, "save_strategy": "steps", "save_steps": 1, "max_steps": 1})
    told, other = testing.run(_warned, str(tmp_path), str(tmp_path / "checkpoint-1"))
    assert "was written with 8 samples a step, and here a step has 4" in told[0]
    assert len(told) == 1
    assert other == []


# Folders of others.


@pytest.mark.parametrize(
    "arguments",
    [flag(SHARDED), flag(STAGE3), flag(FSDP), *(flag(one, slow=True) for one in (DDP, ZERO, STAGE1, STAGE2))],
)
def test_a_checkpoint_of_the_librarys_own_trainer_is_taken_over(
    arguments: dict[str, Any], reference: tuple[tiny.Training, Path], tmp_path: Path
) -> None:
    expected, folder = reference
    for seen in testing.run(train, str(tmp_path), arguments, str(folder / "checkpoint-2")):
        assert_goes_on(seen, expected)


def test_a_checkpoint_of_one_process_is_taken_over_by_two(tmp_path: Path) -> None:
    alone = {**EACH, "gradient_accumulation_steps": 4}
    expected = testing.run(partial(train, own=True), str(tmp_path), alone, processes=1)[0]
    for seen in testing.run(train, str(tmp_path), FSDP, str(tmp_path / "checkpoint-4")):
        assert_goes_on(seen, expected)


def _consolidated(checkpoint: str, model: str) -> None:
    """Have FairScale write the optimizer's state, as the --sharded_ddp of 4.2 to 4.34 did."""
    from fairscale.optim import OSS

    made = trainer(checkpoint, {"model": model}, own=True)
    plain = made.create_optimizer()
    oss = OSS(plain.param_groups, optim=torch.optim.AdamW, lr=1e-2)
    path = Path(checkpoint, "optimizer.pt")
    oss.load_state_dict(torch.load(path, weights_only=True))
    oss.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        state = oss.state_dict()
        for group in state["param_groups"]:
            # Of the AdamW that was the library's own.
            group["correct_bias"] = True
        torch.save(state, path)


def test_a_checkpoint_of_the_sharded_ddp_that_was_is_taken_over(
    reference: tuple[tiny.Training, Path], tmp_path: Path
) -> None:
    expected, folder = reference
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(folder / "checkpoint-2", checkpoint)
    testing.run(_consolidated, str(checkpoint), "gpt2")
    for seen in testing.run(train, str(tmp_path), SHARDED, str(checkpoint)):
        assert_goes_on(seen, expected)


def _engine_alone(folder: str, stage: int) -> None:
    """Train with DeepSpeed's engine and have it save, as the library's own integration does, in the same files."""

    class Saves(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            place, engine = Path(folder, "checkpoint-4"), made.session._engine
            for own, user in zip(engine._groups, engine.optimizer.param_groups, strict=True):
                own["lr"] = user["lr"]
            engine._engine.save_checkpoint(str(place))
            if dist.get_rank() == 0:
                torch.save(made.lr_scheduler.state_dict(), place / "scheduler.pt")
                # Stage 3 leaves none.
                (place / "model.safetensors").unlink()
            control.should_training_stop = True

    with overriding(control=True, any_version=False):
        arguments = {**EACH, "save_steps": 4, "save_only_model": True, "gradient_accumulation_steps": 1}
        made = trainer(folder, {"strategy": f"deepspeed:stage={stage}", **arguments})
        made.add_callback(Saves())
        made.train()


@pytest.mark.parametrize(
    ("stage", "arguments"),
    [
        (2, FSDP),
        pytest.param(0, DDP, marks=pytest.mark.slow),
        pytest.param(1, STAGE3, marks=pytest.mark.slow),
        pytest.param(3, SHARDED, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_the_librarys_own_deepspeed_is_taken_over(
    stage: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    single = {"gradient_accumulation_steps": 1}
    expected = testing.run(partial(train, own=True), str(tmp_path / "own"), single)[0]
    testing.run(_engine_alone, str(tmp_path), stage)
    for seen in testing.run(train, str(tmp_path / "new"), {**arguments, **single}, str(tmp_path / "checkpoint-4")):
        assert_goes_on(seen, expected)
    assert [path.name for path in (tmp_path / "new").iterdir()] == []


def _weights_alone(folder: str, checkpoint: str) -> tuple[list[str], tiny.Training, tiny.Training]:
    seen: list[tiny.Training] = []
    told = told_by(lambda: seen.append(train(folder, STAGE3, checkpoint)))
    return told, seen[0], train(folder, {}, checkpoint, own=True)


def test_a_folder_with_weights_alone_is_taken_as_the_library_does_with_a_warning(tmp_path: Path) -> None:
    testing.run(train, str(tmp_path), {**FSDP, **EACH, "save_only_model": True})
    first, other = testing.run(_weights_alone, str(tmp_path), str(tmp_path / "checkpoint-2"))
    assert "holds weights and no optimizer's state" in first[0][0]
    for told, seen, own in (first, other):
        assert len(told) == (told is first[0])
        assert_goes_on(seen, own)


# What is refused.


def _refused(folder: str, cases: list[tuple[dict[str, Any], Any, bool]]) -> list[str]:
    found = []
    for arguments, checkpoint, own in cases:
        made = trainer(folder, arguments, own=own)
        before = {name: value.clone() for name, value in made.model.state_dict().items()}
        found.append(refusal(partial(made.train, resume_from_checkpoint=checkpoint)))
        if not own:
            weights = made.model.state_dict() if made.session is None else made.session.full_weights()
            assert all(torch.equal(value, weights[name]) for name, value in before.items()), found[-1]
    return found


def test_what_does_not_fit_is_refused_on_every_rank_before_anything_moves(
    reference: tuple[tiny.Training, Path], tmp_path: Path
) -> None:
    testing.run(train, str(tmp_path), {**FSDP, **EACH, "max_steps": 1})
    written = tmp_path / "checkpoint-1"
    theirs = reference[1] / "checkpoint-2"

    def copy(name: str, of: Path) -> Path:
        return Path(shutil.copytree(of, tmp_path / name))

    damaged = copy("damaged", written)
    weights = next((damaged / "shardkit").glob("step-*")) / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    torn = copy("torn", theirs)
    (torn / "optimizer.pt").write_bytes((torn / "optimizer.pt").read_bytes()[:1000])
    unscheduled = copy("unscheduled", theirs)
    (unscheduled / "scheduler.pt").unlink()
    foreign = copy("foreign", theirs)
    state = torch.load(foreign / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"] = torch.zeros(3, 3)
    torch.save(state, foreign / "optimizer.pt")
    interrupted = copy("interrupted", written)
    (interrupted / "trainer_state.json").unlink()
    (tmp_path / "empty").mkdir()
    cases = {
        "without a flag": ({}, written, False, "under a strategy of shardkit, and no flag asks for one"),
        "the library's own": ({}, written, True, "different number of parameter groups"),
        "another model": ({**STAGE3, "model": "t5"}, written, False, "are one tensor here, and in the checkpoint"),
        "other sizes": ({**STAGE3, "words": 50}, written, False, "'transformer.wte.weight' (40, 16) in the checkpoint"),
        "another optimizer": (
            {**DDP, "optim": "sgd"},
            written,
            False,
            "of the optimizer AdamW, and this session's is SGD",
        ),
        "another schedule": (
            {**DDP, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            written,
            False,
            "it was written with a schedule of another kind",
        ),
        "damaged": (SHARDED, damaged, False, "weights.safetensors"),
        "interrupted": (DDP, interrupted, False, "has no trainer_state.json, which is written last"),
        "empty": (DDP, tmp_path / "empty", False, "Can't find a valid checkpoint at"),
        "their optimizer": ({**STAGE2, "optim": "sgd"}, theirs, False, "which this session's SGD doesn't have"),
        "their model": ({**DDP, "model": "t5"}, theirs, False, "it is of another model, or of other groups"),
        "torn": (FSDP, torn, False, "is damaged, or no file of torch.save"),
        "without a schedule": (FSDP, unscheduled, False, "but no schedule's state in scheduler.pt"),
        "state of other shapes": (FSDP, foreign, False, "has 'exp_avg' of shape (3, 3) where this model has"),
    }
    found = testing.run(_refused, str(tmp_path), [(one[0], str(one[1]), one[2]) for one in cases.values()])
    for rank in found:
        for (name, (*_, words)), told in zip(cases.items(), rank, strict=True):
            assert words in told, f"{name}: {told}"
            assert told == found[0][list(cases).index(name)]


def _fails_to_save(folder: str) -> tuple[str, list[str], int, str]:
    """Have one rank fail in the midst of a save, go on, and refuse where no checkpoint is whole."""
    made = trainer(folder, {**STAGE2, **EACH})
    own = transformers.Trainer._save_rng_state

    def broken(self: Any, output_dir: str) -> None:
        if output_dir.endswith("checkpoint-2") and dist.get_rank() == 1:
            raise OSError(28, "No space left on device", "rng_state_1.pth")
        own(self, output_dir)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Trainer, "_save_rng_state", broken)
        told = refusal(made.train)
    again = trainer(folder, STAGE2)
    warned = told_by(lambda: again.train(resume_from_checkpoint=True))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "checkpoint-1", "trainer_state.json").write_text("{")
    dist.barrier()
    nothing = refusal(partial(trainer(folder, STAGE2).train, resume_from_checkpoint=True))
    return told, warned, again.state.global_step, nothing


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_last_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    first, other = testing.run(_fails_to_save, str(tmp_path))
    assert "can't write 'rng_state_1.pth': No space left on device" in first[0]
    assert first[0] == other[0]
    assert len(first[1]) == 1
    assert "checkpoint-2' has no trainer_state.json" in first[1][0]
    assert "Going on from" in first[1][0]
    assert first[2] == other[2] == 6
    assert "no checkpoint in" in first[3]
    assert "checkpoint-2' has no trainer_state.json" in first[3]
    assert first[3] == other[3]


def _saved_again(folder: str) -> list[bool]:
    """Go on from an early checkpoint over the later ones of another run, and be stopped while one is written."""

    class StoppedError(Exception):
        pass

    made = trainer(folder, {**DDP, **EACH})

    def stop(*_: Any) -> None:
        raise StoppedError

    made._save_optimizer_and_scheduler = stop
    with contextlib.suppress(StoppedError):
        made.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return [Path(folder, f"checkpoint-{step}", "trainer_state.json").exists() for step in (2, 3)]


def test_a_checkpoint_that_is_written_over_one_of_an_earlier_run_is_not_whole_until_it_is(tmp_path: Path) -> None:
    testing.run(train, str(tmp_path), {**DDP, **EACH}, processes=1)
    assert testing.run(_saved_again, str(tmp_path), processes=1) == [[True, False]]


# One Trainer after another.


def _again(folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    found = {"own": [trainer(folder, {}, own=True).evaluate()["eval_loss"]], "here": []}
    for name, own in (("own", True), ("here", False)):
        made = trainer(folder, {} if own else arguments, own=own)
        if not own:
            # Under plain DDP the library's own then averages no gradients.
            found[name].append(made.evaluate()["eval_loss"])
        made.train()
        made.train()
        # Another Trainer over the same model, with an optimizer of its own.
        settings = replace(made.args, learning_rate=5e-3)
        data = {"train_dataset": tiny.samples(24), "eval_dataset": made.eval_dataset}
        other = type(made)(model=made.model, args=settings, **data)
        other.remove_callback(transformers.PrinterCallback)
        other.train()
        for one in (made, other):
            found[name] += [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        found[name].append(other.evaluate()["eval_loss"])
    return found


@pytest.mark.parametrize("arguments", [flag(SHARDED), flag(STAGE3), flag(FSDP, slow=True), flag(HALF, slow=True)])
def test_train_again_and_by_another_trainer_goes_on_as_the_librarys_own(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    # In half precision other numbers come out: that it runs is what is shown.
    tolerance = 0.05 if "bf16" in arguments else LOSS
    for found in testing.run(_again, str(tmp_path), arguments):
        assert len(found["own"]) == 14
        torch.testing.assert_close(found["here"], found["own"], rtol=tolerance, atol=0)


def _trials(folder: str) -> tuple[list[list[float]], int]:
    from shardkit.transformers import _accelerator

    template = trainer(folder, STAGE3)
    models: list[Any] = []
    made = type(template)(
        model_init=lambda: models.append(tiny.gpt2()) or models[-1],
        args=template.args,
        train_dataset=tiny.samples(24),
        eval_dataset=template.eval_dataset,
    )
    made.remove_callback(transformers.PrinterCallback)
    losses = []
    for _ in range(2):
        made.train()
        losses.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
        # As a search over hyperparameters does.
        made.create_accelerator_and_postprocess()
    return losses, sum(map(_accelerator.is_open, models))


def test_trials_with_a_fresh_model_each_are_the_same_and_leave_no_session_open(tmp_path: Path) -> None:
    for (first, second), left in testing.run(_trials, str(tmp_path)):
        assert len(first) == 6
        assert first == second
        assert left == 0


def test_a_checkpoint_holds_what_the_page_says(tmp_path: Path) -> None:
    testing.run(train, str(tmp_path), {**FSDP, **EACH, "max_steps": 1})
    names = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.pt",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "scheduler.pt",
        "shardkit",
        "trainer_state.json",
        "training_args.bin",
    }
    assert json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["global_step"] == 1
