"""Plugins that go wrong, each in a distribution of its own, and the words that their errors have."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HEAD = """
import sys, shardkit
from dataclasses import dataclass
from typing import Any
from shardkit import Backend, Engine, Finding, Update, Variant, hookimpl, option


def backend(name, **settings):
    return Backend(**{"name": name, "summary": "", "variants": (Variant(strategy=name, summary=""),), **settings})


class WholeEngine(Engine):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self._step = model, optimizer, optimizer.step

    def backward(self, loss, gradient, *, last):
        loss.backward(gradient)

    def step(self):
        self._step()
        return Update(True)

    def full_gradients(self):
        return {}


def prepared(model, optimizer):
    return WholeEngine(model, optimizer)


"""

DESCRIBE = "@hookimpl\ndef shardkit_describe(): return backend(NAME{settings})\n"
PREPARE = "@hookimpl\ndef shardkit_prepare(model, optimizer): {does}\n"


class Bad(NamedTuple):
    """A plugin's code, and what its error says."""

    code: str
    says: str
    """A regular expression of what is wrong."""
    advice: str = r"update it \(pip install -U their-NAME\).* or uninstall it \(pip uninstall their-NAME\)"
    """A regular expression of what to do; NAME stands for the plugin's."""
    requires: tuple[str, ...] = ()
    entry: str | None = None
    """What the entry point reads, if not the module's name."""


def declared(settings: str, does: str = "return prepared(model, optimizer)") -> str:
    """Return the code of a plugin that declares these settings."""
    return DESCRIBE.format(settings=f", {settings}" if settings else "") + PREPARE.format(does=does)


WHOLE = declared("")
OPTIONS = "@dataclass(frozen=True)\nclass Options:\n    {field}\n" + declared("options=Options")

UNDESCRIBED = {
    # Its import.
    "exits": Bad("sys.exit(3)", r"fails to import: it exits the interpreter \(SystemExit: 3\)"),
    "syntax": Bad("def", "fails to import: SyntaxError"),
    "raising": Bad("1 / 0", "fails to import: ZeroDivisionError: division by zero"),
    "lacking": Bad("import no_such_module", "fails to import: ModuleNotFoundError: No module named 'no_such_module'"),
    "gone-module": Bad(
        WHOLE,
        "has an entry point to the module 'no_such_plugin', and there is no 'no_such_plugin'",
        entry="no_such_plugin",
    ),
    "gone-object": Bad(
        WHOLE, "has an entry point to 'their_gone_object:plugin', and the module has no 'plugin'", entry="MODULE:plugin"
    ),
    "unreadable": Bad(WHOLE, "has an entry point that reads 'their module', not 'module' or", entry="their module"),
    # Of another version.
    "newer": Bad(
        WHOLE,
        r"needs shardkit>=99, and this is shardkit \d",
        r'install one that fits \(pip install -U "shardkit>=99"\), or another version of their-newer',
        requires=("torch", "shardkit>=99"),
    ),
    "older": Bad(WHOLE, r"needs shardkit<0.0.1, and this is", "another version of", requires=("shardkit<0.0.1",)),
    "newer-name": Bad(
        "from shardkit import Nothing",
        r"fails to import, as if written for another version than this shardkit .*cannot import name 'Nothing'",
        "update both: pip install -U shardkit their-newer-name",
    ),
    "newer-module": Bad(
        "from shardkit.nothing import at_all", "as if written for another version .*shardkit.nothing", "update both"
    ),
    "newer-attribute": Bad(
        "shardkit.Nothing", "as if written for another version .*has no attribute 'Nothing'", "update both"
    ),
    "newer-field": Bad(
        declared("colour='blue'"), "shardkit_describe: TypeError: .*'colour'.* as if written for another version"
    ),
    # Its hooks.
    "misspelled": Bad(
        WHOLE + "@hookimpl\ndef shardkit_footprnt(model): ...\n",
        r"do not exist: shardkit_footprnt \(did you mean 'shardkit_footprint'\?\); hooks are shardkit_control,",
        "spell it so",
    ),
    "nearly": Bad(
        DESCRIBE.format(settings="") + "def shardkit_prepair(model): ...\n",
        "has shardkit_prepare under the name 'shardkit_prepair' without the mark of a hook",
        "write @shardkit.hookimpl above it and name it shardkit_prepare",
    ),
    "unmarked": Bad(
        WHOLE + "def shardkit_diagnose(): ...\n",
        "has shardkit_diagnose without the mark of a hook, so that it would never be called",
        "write @shardkit.hookimpl above it$",
    ),
    "hookless": Bad("", "does not implement shardkit_describe and shardkit_prepare", "names the module or object"),
    "only-wraps": Bad(
        DESCRIBE.format(settings="") + "@hookimpl(wrapper=True)\ndef shardkit_prepare(): return (yield)\n",
        "does not implement shardkit_prepare, marked",
        "a backend has shardkit_describe and shardkit_prepare",
    ),
    "argument": Bad(
        DESCRIBE.format(settings="") + "@hookimpl\ndef shardkit_prepare(modle): ...\n",
        r"its shardkit_prepare asks for an argument 'modle' \(did you mean 'model'\?\)",
        "the hook has model, optimizer, strategy, options, of which",
    ),
    "classy": Bad(
        "class Plugin:\n    @hookimpl\n    def shardkit_describe(self): ...\n",
        "is a class, whose hooks have nobody to be called on",
        "name an object of it",
        entry="MODULE:Plugin",
    ),
    # What it declares.
    "describes-raising": Bad(
        DESCRIBE.format(settings=", summary=1/0") + PREPARE, "raises in its shardkit_describe: Zero"
    ),
    "describes-exiting": Bad(
        DESCRIBE.format(settings=", summary=sys.exit(4)") + PREPARE,
        "exits the interpreter with 4 in its shardkit_describe",
    ),
    "describes-dict": Bad(
        "@hookimpl\ndef shardkit_describe(): return {}\n" + PREPARE,
        "returns {} from its shardkit_describe, which returns",
    ),
    "describes-none": Bad(
        "@hookimpl\ndef shardkit_describe(): ...\n" + PREPARE, "returns None from its shardkit_describe"
    ),
    "describes-other": Bad(WHOLE.replace("NAME", "'other'"), "it describes a backend named 'other': that name and the"),
    "Capital": Bad(WHOLE, "the name of a backend begins with a letter and is lower-case .* not 'Capital'"),
    "auto": Bad(WHOLE, "the name 'auto' has a meaning of its own"),
    "wants-nonsense": Bad(declared("requires='two words'"), "'requires' is a pip requirement, .* not 'two words'"),
    "library-path": Bad(declared("library='my-library'"), "'library' is the name that the library is imported by, not"),
    "summary": Bad(declared("summary=None"), "field 'summary' of backend 'summary' is a string, not None"),
    "environment": Bad(declared("environment='MY_'"), "field 'environment' .* is a tuple, .* not 'MY_'"),
    "keys": Bad(declared("config_keys=frozenset({'a'})"), "it declares config_keys, and its options NoOptions have no"),
    # Its words.
    "shards": Bad(
        declared("variants=(Variant(strategy=NAME, summary='', shards=frozenset({'optimiser'})),)"),
        r"field 'shards' of variant 'shards' has 'optimiser': did you mean 'optimizer'\? known are parameters,",
    ),
    "shards-text": Bad(
        declared("variants=(Variant(strategy=NAME, summary='', shards='optimizer'),)"),
        r"field 'shards' .* is a frozenset, such as frozenset\({'optimizer'}\), not 'optimizer'",
    ),
    "offloads": Bad(
        declared("variants=(Variant(strategy=NAME, summary='', offloads=frozenset({'cpu'})),)"),
        "'offloads' .* has 'cpu'",
    ),
    "devices": Bad(
        declared("devices=frozenset({'gpu'})"), "field 'devices' of backend 'devices' has 'gpu': .*known are cpu"
    ),
    "precisions": Bad(
        declared("precisions=frozenset({'fp8'})"), "'precisions' .* has 'fp8'.*known are fp32, bf16, fp16"
    ),
    "speed": Bad(
        declared("variants=(Variant(strategy=NAME, summary='', speed=-1),)"), "'speed' .* is above 0 .* not -1"
    ),
    # Its variants.
    "variants-other": Bad(
        declared("variants=(Variant(strategy='ddp', summary=''),)"), "its variant 'ddp' asks for backend 'ddp'"
    ),
    "variants-option": Bad(
        declared("variants=(Variant(strategy=NAME + ':stage=3', summary=''),)"),
        "its variant 'variants-option:stage=3' can't be asked for: .* has no option 'stage'",
    ),
    "variants-twice": Bad(declared("variants=(Variant(strategy=NAME, summary=''),) * 2"), "is declared twice"),
    "variants-none": Bad(declared("variants=()"), "it declares no variants"),
    "variants-list": Bad(declared("variants=[]"), r"field 'variants' .* is a tuple, such as \(Variant\(.* not \[\]"),
    "variants-text": Bad(declared("variants=(NAME,)"), "field 'variants' .* holds Variants, .* not 'variants-text'"),
    # Its options.
    "options-dict": Bad(declared("options={}"), "field 'options' .* is a frozen dataclass, the class itself, not {}"),
    "options-thawed": Bad(
        OPTIONS.replace("(frozen=True)", "").format(field="a: int = option(1, 'doc')"),
        "are a frozen dataclass: write @data",
    ),
    "options-needed": Bad(OPTIONS.format(field="a: int"), "option 'a' of its options Options has no default"),
    "options-any": Bad(
        OPTIONS.format(field="a: Any = option(1, '')"), "option 'a' .* is of a type that can't be checked"
    ),
    "options-hidden": Bad(
        OPTIONS.format(field="a: 'Hidden' = option(1, '')"), "the types of .* can't be read .*Hidden"
    ),
    "options-shared": Bad(
        OPTIONS.format(field="accumulate: int = option(1, '')"), "which a strategy sets for every backend"
    ),
}
"""What can't even be described."""

UNPREPARED = {
    "gives-text": Bad(
        declared("", "return 'engine'"), "shardkit_prepare of plugin .* returns 'engine', which is no Engine"
    ),
    "gives-none": Bad(
        declared("", "return None"), "returns None from its shardkit_prepare", "report it to its authors"
    ),
    "leaves": Bad(declared("", "sys.exit(5)"), "exits the interpreter with 5 in its shardkit_prepare"),
    "modelless": Bad(
        declared("", "engine = prepared(model, optimizer); del engine.model; return engine"),
        "returns a WholeEngine whose 'model' is None: set self.model",
        "",
    ),
    "out-of-step": Bad(
        declared("", "engine = prepared(model, optimizer); engine.lockstep = 'step'; return engine"),
        "returns a WholeEngine whose 'lockstep' is 'step': it is one of window, backward, forward",
        "",
    ),
}
"""What can be described, and builds nothing that could be used."""

FAILING = {
    "fails": Bad(declared("", "1 / 0"), "ZeroDivisionError: division by zero"),
    "fails-on-one": Bad(
        declared("", "import os; 1 / (1 - int(os.environ.get('RANK', 1))); return prepared(model, optimizer)"),
        "ZeroDivisionError: division by zero",
    ),
}
"""What raises an error of its own, which goes through."""

OTHER_HOOKS = {
    "footprint-text": Bad(
        WHOLE + "@hookimpl\ndef shardkit_footprint(): return 'big'\n", "returns 'big' from its shardkit_footprint"
    ),
    "footprint-fails": Bad(
        WHOLE + "@hookimpl\ndef shardkit_footprint(): 1 / 0\n", "raises in its shardkit_footprint: Zero"
    ),
    "footprint-loose": Bad(
        WHOLE
        + "class Loose(shardkit.Footprint):\n    def stepped(self): return ()\n    def step(self): return None\n"
        + "@hookimpl\ndef shardkit_footprint(model): return Loose(model)\n",
        "returns from its shardkit_footprint what doesn't work .TypeError",
    ),
    "diagnose-text": Bad(
        WHOLE + "@hookimpl\ndef shardkit_diagnose(): return 'ill'\n", "returns 'ill' from its shardkit_dia"
    ),
    "diagnose-exits": Bad(
        WHOLE + "@hookimpl\ndef shardkit_diagnose(): sys.exit(6)\n", "exits the interpreter with 6 in its"
    ),
    "import-text": Bad(
        WHOLE + "@hookimpl\ndef shardkit_import(): return 'weights'\n", "returns 'weights' from its shardkit_i"
    ),
    "import-fails": Bad(WHOLE + "@hookimpl\ndef shardkit_import(): 1 / 0\n", "division by zero"),
    "control-text": Bad(
        WHOLE + "@hookimpl\ndef shardkit_control(): return 'engine'\n",
        "shardkit_control of plugin .* returns 'engine', which",
    ),
}
"""What trains, and has another hook that goes wrong."""


def install(
    folder: Path,
    name: str,
    code: str,
    *,
    requires: Sequence[str] = (),
    entry: str | None = None,
    group: str = "shardkit.backends",
    distribution: str | None = None,
) -> None:
    """Put a distribution with one plugin into a folder, version 1.2, as pip would leave it."""
    distribution = distribution or f"their-{name}"
    module = distribution.replace("-", "_").lower()
    (folder / f"{module}.py").write_text(textwrap.dedent(code))
    info = folder / f"{module}-1.2.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n{needs}")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {(entry or module).replace('MODULE', module)}\n")


def install_all(folder: Path, plugins: dict[str, Bad]) -> None:
    """Install all of these."""
    for name, bad in plugins.items():
        install(folder, name, HEAD + bad.code.replace("NAME", repr(name)), requires=bad.requires, entry=bad.entry)
