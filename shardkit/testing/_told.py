"""What a failed case saw, and what would have been right."""

from __future__ import annotations

import ast
import contextlib
import re
import traceback
from types import FrameType
from typing import Any, NamedTuple

import torch


class Told(NamedTuple):
    """What a backend did, and what is right."""

    did: str
    right: str


NOTHING = Told("", "")


def told(error: BaseException) -> Told:
    """Return what this error of a case says of the backend."""
    if isinstance(error, AssertionError):
        return seen(error)
    missed = re.match(r"DID NOT RAISE (.*)", str(error))
    if missed:
        return Told("raised nothing", f"raises {_names(missed[1])}")
    return Told(f"raised {type(error).__name__}: {first_line(error)}", "no error")


def seen(error: AssertionError) -> Told:
    """Return what a failed assertion of a case saw, and what would have been right, if that is short to say."""
    found, line = error.__traceback__, ""
    while found is not None:
        code = found.tb_frame.f_code
        if "/testing/cases/" in code.co_filename:
            if code.co_name == "assert_close":
                told = difference(found.tb_frame.f_locals)
                return Told(", ".join([told.did, *getattr(error, "__notes__", [])]), told.right)
            line = traceback.extract_tb(found)[0].line or ""
            line += _left_side(line, found.tb_frame)
        found = found.tb_next
    if not line.startswith("assert "):
        return Told(f"failed: {first_line(error)}", "")
    return Told(shortened(line.removeprefix("assert ")), "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without the folders of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shortened(lines[0]) if lines else ""


def shortened(text: str, length: int = 220) -> str:
    """Return a text without the folders of this machine, and not over a length."""
    text = re.sub(r"/\S+/(\S+)", r"\1", text)
    text = re.sub(r"(Connection (closed|reset) by peer).*", r"\1", text)
    return text if len(text) <= length else text[: length - 1] + "…"


def _names(text: str) -> str:
    return ", ".join(re.findall(r"(\w+)'>", text)) or text


def _left_side(line: str, frame: FrameType) -> str:
    """Return what stood left of a comparison, if it is only names."""
    with contextlib.suppress(Exception):
        tree = ast.parse(line).body[0]
        assert isinstance(tree, ast.Assert)
        assert isinstance(tree.test, ast.Compare)
        left = tree.test.left
        called = {ast.unparse(node.func) for node in ast.walk(left) if isinstance(node, ast.Call)}
        # A call of anything else could be a collective, and the other rank is elsewhere.
        if called <= {"list", "type", "len"}:
            return f" does not hold: {eval(ast.unparse(left), frame.f_globals, frame.f_locals)}"
    return " does not hold"


def difference(values: dict[str, Any]) -> Told:
    """Return how the tensors of a comparison differ: of one element or a few the values themselves."""
    actual, expected = values["actual"], values["expected"]
    if isinstance(expected, dict):
        if list(actual) != list(expected):
            names = [shortened(", ".join(found), 60) for found in (actual, expected)]
            return Told(f"names {names[0]}", names[1])
        name = values.get("name", "")
        actual, value = actual[name], expected[name]
        where = f"{name}: " if name else ""
    else:
        value, where = expected, ""
    actual, value = torch.as_tensor(actual).detach(), torch.as_tensor(value).detach()
    if actual.shape != value.shape:
        return Told(f"{where}shape {tuple(actual.shape)}", str(tuple(value.shape)))
    if value.numel() <= 4:
        return Told(f"{where}{_number(actual)}", _number(value))
    away = (actual.double() - value.double()).abs().max().item()
    return Told(f"{where}{value.numel()} values, away by up to {away:.2g}", "")


def _number(value: torch.Tensor) -> str:
    numbers = [f"{one:.5g}" for one in value.flatten().tolist()]
    return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"
