"""What the Trainer writes: the best model, folders for from_pretrained, and how much memory that takes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from shardkit import testing
from tests.transformers import tiny
from tests.transformers.test_resume import DDP, EACH, FSDP, HALF, SHARDED, STAGE2, STAGE3, flag, refusal, trainer

with contextlib.suppress(ImportError):
    import transformers

STAGE3_HALF: dict[str, Any] = {"strategy": "deepspeed:stage=3,half_weights=true", "bf16": True}
ALL = [DDP, SHARDED, STAGE3, FSDP, HALF, STAGE2, STAGE3_HALF]


def strategies(*default: dict[str, Any]) -> list[Any]:
    """Return all as parameters of tests, those that aren't among the default ones marked as slow."""
    return [flag(one, slow=one not in default) for one in ALL]


# The best model.


def _best(folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    # A rate at which the loss falls first and rises then.
    made = trainer(
        folder,
        {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "load_best_model_at_end": True,
            "learning_rate": 0.3,
            "num_train_epochs": 3,
            "save_total_limit": 1,
            **EACH,
            **arguments,
        },
    )
    made.train()
    log = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    weights = {name: value.clone() for name, value in made.session.full_weights().items()}
    with made.session.evaluate() as module:
        held = {name: value.float().clone() for name, value in module.state_dict().items()}
    return {
        "log": log,
        "best": made.state.best_model_checkpoint,
        "again": made.evaluate()["eval_loss"],
        "weights": weights,
        "held": held,
    }


@pytest.mark.parametrize(
    ("arguments", "saved"),
    [
        *(pytest.param(*one.values, {}, id=f"{one.id} each", marks=one.marks) for one in strategies(SHARDED, STAGE3)),
        *(
            pytest.param(*one.values, {"save_strategy": "best", "save_only_model": True}, id=one.id, marks=one.marks)
            for one in strategies(FSDP, HALF)
        ),
    ],
)
def test_the_best_model_is_in_every_rank_at_the_end(
    arguments: dict[str, Any], saved: dict[str, Any], tmp_path: Path
) -> None:
    first, other = testing.run(_best, str(tmp_path), {**arguments, **saved})
    log = first["log"]
    step = 1 + log.index(min(log))
    assert 1 <= step < len(log), "the last step is the best: the test shows nothing"
    folder = tmp_path / f"checkpoint-{step}"
    assert first["best"] == other["best"] == str(folder)
    written = safetensors.torch.load_file(folder / "model.safetensors")
    for found in (first, other):
        assert found["again"] == min(log)
        for name, value in written.items():
            assert value.dtype == torch.float32
            assert torch.equal(found["weights"][name], value), name
            whole = value.bfloat16().float() if "half_weights" in arguments.get("strategy", "") else value
            assert torch.equal(found["held"][name], whole), name
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [folder.name]


def _limited(folder: str, arguments: dict[str, Any]) -> int:
    made = trainer(folder, {**EACH, **arguments})
    made.train()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_as_many_checkpoints_stay_as_the_limit_says_and_none_leaves_a_file_open(tmp_path: Path) -> None:
    few, more = tmp_path / "few", tmp_path / "more"
    opened = testing.run(_limited, str(few), {**FSDP, "save_total_limit": 2, "save_on_each_node": True, "max_steps": 3})
    assert sorted(path.name for path in few.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert opened == testing.run(_limited, str(more), {**FSDP, "max_steps": 6})
    assert len(list(more.iterdir())) == 6


# Folders for from_pretrained.


def _save_model(folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    made = trainer(folder, arguments)
    made.model.generation_config.max_new_tokens = 7
    made.save_model(f"{folder}/before")
    made.train()
    made.save_model(f"{folder}/after")
    dist.barrier()
    loaded = type(made.model).from_pretrained(f"{folder}/after")
    weights = made.session.full_weights()
    made.session.close()
    made.save_model(f"{folder}/closed")
    return {
        "weights": weights,
        "equal": all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items()),
        "names": sorted(loaded.state_dict()) == sorted(weights),
        "new": loaded.generation_config.max_new_tokens,
        "dtypes": {value.dtype for value in loaded.state_dict().values()},
        "loss": loaded.eval()(**batch()).loss.item(),
    }


def batch() -> dict[str, torch.Tensor]:
    made = tiny.samples(2, seed=5)
    return {name: torch.stack([one[name] for one in made]) for name in made[0]}


@pytest.mark.parametrize("model", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("arguments", strategies(STAGE3, FSDP, HALF))
def test_from_pretrained_loads_what_save_model_wrote(arguments: dict[str, Any], model: str, tmp_path: Path) -> None:
    first, other = testing.run(_save_model, str(tmp_path), {**arguments, "model": model})
    assert all(torch.equal(value, other["weights"][name]) for name, value in first["weights"].items())
    assert first["loss"] == other["loss"]
    assert first["equal"]
    assert first["names"]
    assert first["new"] == 7
    assert first["dtypes"] == {torch.float32}
    names = safetensors.torch.load_file(tmp_path / "after" / "model.safetensors").keys()
    tied = {"gpt2": {"lm_head.weight"}, "t5": {"lm_head.weight", "encoder.embed_tokens.weight"}}[model]
    assert not tied & names
    for folder in ("after", "closed"):
        written = safetensors.torch.load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == names
        assert all(torch.equal(value, first["weights"][name]) for name, value in written.items()), folder
    fresh = tiny.MODELS[model]().state_dict()
    before = safetensors.torch.load_file(tmp_path / "before" / "model.safetensors")
    assert all(torch.equal(fresh[name], value) for name, value in before.items())
    assert len(before) == len(names)


def _saves_alone(folder: str, arguments: dict[str, Any]) -> list[str]:
    made = trainer(folder, {**arguments, "max_steps": 1})
    made.train()
    copies = []
    own = made.session._engine.full_weights
    made.session._engine.full_weights = lambda: copies.append("copy") or own()
    told = refusal(lambda: made.save_model(f"{folder}/alone")) if dist.get_rank() == 0 else "elsewhere"
    dist.barrier()
    made.save_model(f"{folder}/together")
    return [told, *copies]


def test_one_rank_may_save_alone_and_without_a_copy_what_it_holds_whole(tmp_path: Path) -> None:
    assert testing.run(_saves_alone, str(tmp_path), SHARDED) == [["no error"], ["elsewhere"]]
    assert testing.run(_saves_alone, str(tmp_path), STAGE2) == [["no error"], ["elsewhere"]]
    assert (tmp_path / "alone" / "model.safetensors").is_file()


@pytest.mark.slow
def test_one_rank_that_saves_split_weights_alone_is_told(tmp_path: Path) -> None:
    first, other = testing.run(_saves_alone, str(tmp_path), STAGE3)
    assert "save_model is collective: call it on all ranks" in first[0]
    assert other[0] == "elsewhere"
    assert (tmp_path / "together" / "model.safetensors").is_file()


def _cannot_write(folder: str, arguments: dict[str, Any]) -> list[str]:
    made = trainer(folder, {**arguments, **EACH})

    def fails(self: Any, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "save_pretrained", fails)
        return [refusal(made.train), refusal(lambda: type(made.model).from_pretrained(f"{folder}/checkpoint-1"))]


@pytest.mark.parametrize("arguments", [DDP, STAGE3])
def test_a_checkpoint_that_one_rank_can_not_write_fails_alike_on_all(arguments: dict[str, Any], tmp_path: Path) -> None:
    first, other = testing.run(_cannot_write, str(tmp_path), arguments)
    assert "can't write 'model.safetensors': No space left on device" in first[0]
    assert first[0] == other[0]
    assert "no error" not in first[1]


def _by_the_user(folder: str, arguments: dict[str, Any]) -> str:
    made = trainer(folder, {**arguments, "max_steps": 1})
    made.train()
    return refusal(lambda: made.model.save_pretrained(f"{folder}/{dist.get_rank()}"))


@pytest.mark.parametrize("arguments", [STAGE3, FSDP])
def test_save_pretrained_of_split_weights_says_what_to_do(arguments: dict[str, Any], tmp_path: Path) -> None:
    for told in testing.run(_by_the_user, str(tmp_path), arguments):
        assert "full_weights" in told
