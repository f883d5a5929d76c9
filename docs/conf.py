"""The site: `sphinx-build -W -c docs . build/site`. Its source is the repository: links are checked as they stand."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from types import ModuleType

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import shardkit

ROOT = Path(__file__).parent.parent
log = logging.getLogger(__name__)

project = "shardkit"
author = "the authors of shardkit"
release = version = shardkit.__version__
html_title = f"shardkit {version}"
html_theme = "furo"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_math_renderer = "mathml"
smartquotes = False

root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "benchmarks/**"]
exclude_patterns = ["docs/examples/*/*/**", "docs/navigation.md", "**/.*"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

# A role in a docstring that points at nothing fails; types of other libraries have no page here.
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(?!shardkit\.).*"),
    ("py:obj", r"typing\..*"),
    ("py:class", r"shardkit\..*\.[A-Z]"),  # a type variable
    ("py:class", r"shardkit\._windows\.Training"),  # what windows ask of a session
]

REFERENCE = [
    *("shardkit", "shardkit.errors", "shardkit.testing", "shardkit.hookspecs"),
    *("shardkit.checkpoints", "shardkit.parity", "shardkit.bench", "shardkit.bench.outputs", "shardkit.workloads"),
    "shardkit.transformers",
    *("shardkit.averaging", "shardkit.gradients", "shardkit.nested", "shardkit.optimizers", "shardkit.parameters"),
]
"""Modules whose public names each need a place in the reference."""


_FOLDER = "\n```{{toctree}}\n:glob:\n\n{}\n```\n"
NAVIGATION = {
    "README": (ROOT / "docs/navigation.md").read_text(),
    "benchmarks/README": _FOLDER.format("results/*"),
    "docs/decisions/README": _FOLDER.format("0*"),
    "docs/writing-a-backend": _FOLDER.format("examples/*/README") if (ROOT / "docs/examples").exists() else "",
}
"""What stands at a page's end on the site alone. A page that is in none of these lists fails the build."""


def prepare_source(app: Sphinx, document: str, source: list[str]) -> None:
    """Add what pages are on the site and not in the repository: navigation, and titles of tables of figures."""
    source[0] += NAVIGATION.get(document, "")
    if document.startswith("benchmarks/results/") and not source[0].startswith("# "):
        source[0] = f"# {document.rsplit('/', 1)[-1]}\n\n" + re.sub("^###", "##", source[0], flags=re.M)


def resolve(app: Sphinx, tree: nodes.document) -> None:
    """Take links to what is no page, but there: a folder of the repository, or an anchor that is written as HTML."""
    page = Path(tree["source"])
    anchors = {name for raw in tree.findall(nodes.raw) for name in re.findall('id="([^"]+)"', raw.astext())}
    for link in list(tree.findall(pending_xref)):
        target = str(link.get("reftarget", ""))
        if link["reftype"] != "myst":
            continue
        if target in anchors:
            link.replace_self(nodes.reference("", "", *link.children, refid=target, internal=True))
        elif target and (page.parent / target).is_dir():
            link.replace_self(link.children)


def list_errors(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Docstrings end with ``Raises:`` and an indented line for each error: for Sphinx that is a list of fields."""
    if "Raises:" in lines:
        start = lines.index("Raises:")
        errors = [line.removeprefix("    ") for line in lines[start + 1 :]]
        lines[start:] = [line if not line or line.startswith(" ") else f":raises {line}" for line in errors]


def shorten(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A default that a dataclass makes anew is shown as ``...``: Sphinx can't parse how Python writes it."""
    return signature and signature.replace("<factory>", "..."), returns


def public_names(module: ModuleType) -> dict[str, object]:
    """Those that ``__all__`` lists, or else those that are defined there without an underscore."""
    if hasattr(module, "__all__"):
        # Asking for a name that is imported late puts it into its module, where autodoc looks for it.
        return {name: getattr(module, name) for name in module.__all__}
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    }


PUBLIC = {name: public_names(importlib.import_module(name)) for name in REFERENCE}


def check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """A public name without a place in the reference fails the build. One that two modules have needs one place."""
    described = env.domains.python_domain.objects
    for module, names in PUBLIC.items():
        for name, value in names.items():
            homes = [module, *(other for other in PUBLIC if PUBLIC[other].get(name) is value)]
            if not any(f"{home}.{name}" in described for home in homes):
                log.warning("%s.%s has no place in the reference, docs/api", module, name)


def math(self, node: nodes.math) -> None:
    block = isinstance(node, nodes.math_block)
    self.body.append(str(latex2mathml.tex2mathml(node.astext(), as_block=block)))
    raise nodes.SkipNode


def add_front(app: Sphinx, error: Exception | None) -> None:
    """The README's page is also the one that a server shows first."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (math, None), (math, None))
    app.connect("source-read", prepare_source)
    app.connect("doctree-read", resolve)
    app.connect("autodoc-process-docstring", list_errors)
    app.connect("autodoc-process-signature", shorten)
    app.connect("env-check-consistency", check_reference)
    app.connect("build-finished", add_front)
