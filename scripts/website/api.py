"""Pages of the API reference: public names of packages, and their Markdown for mkdocstrings."""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

FOLDER = "reference/api"


@dataclass(frozen=True)
class ApiPage:
    """Page of the API reference.

    Args:
        file: path below `FOLDER`.
        title: heading of the page.
        package: package whose public names the page documents, as they are imported.
        below: if given, only names that are defined in this module or below it.
        summary: text below the heading; None for the first paragraph of the package's docstring.
    """

    file: str
    title: str
    package: str
    below: str | None = None
    summary: str | None = None

    @property
    def uri(self) -> str:
        """Path of the page in the site's sources."""
        return f"{FOLDER}/{self.file}"


AXES = {
    "positions": "Position encodings",
    "patterns": "Attention patterns",
    "kernels": "Attention kernels",
    "memory": "Memories",
    "recurrent": "Recurrent mixers",
    "residuals": "Residual connections",
    "depth": "Adaptive depth",
    "heads": "Output heads with a datastore",
}
"""Package of `rlxf.attention` -> title of its page."""

PAGES = [
    ApiPage("rlxf.md", "rlxf", "rlxf"),
    ApiPage("agents-gtrxl.md", "rlxf.agents.gtrxl", "rlxf.agents.gtrxl"),
    ApiPage(
        "agents-decision-transformer.md",
        "rlxf.agents.decision_transformer",
        "rlxf.agents.decision_transformer",
    ),
    ApiPage("agents-mlp.md", "rlxf.agents.mlp", "rlxf.agents.mlp"),
    ApiPage("envs.md", "rlxf.envs", "rlxf.envs"),
    ApiPage("data.md", "rlxf.data", "rlxf.data"),
    ApiPage("evaluation.md", "rlxf.evaluation", "rlxf.evaluation"),
    ApiPage("off-policy-evaluation.md", "rlxf.off_policy_evaluation", "rlxf.off_policy_evaluation"),
    ApiPage("training.md", "rlxf.training", "rlxf.training"),
    ApiPage(
        "attention/transformer.md",
        "Transformers",
        "rlxf.attention",
        summary="Specs, modules, token indices and states of transformers.",
    ),
    *(
        ApiPage(f"attention/{name}.md", title, "rlxf.attention", below=f"rlxf.attention.{name}")
        for name, title in AXES.items()
    ),
]

FURTHER = ApiPage("further.md", "Further modules", "", summary="Names that are imported from their module.")
FURTHER_NAMES = (
    "rlxf.agents.pretraining.MaskedPretraining",
    "rlxf.agents.contexts.Contexts",
    "rlxf.agents.contexts.act_from_contexts",
    "rlxf.agents.contexts.NBCE",
    "rlxf.agents.contexts.AverageNBCE",
    "rlxf.agents.common.losses.Distillation",
    "rlxf.agents.gtrxl.callbacks.AttentionMapCallback",
    "rlxf.agents.gtrxl.callbacks.HistogramCallback",
    "rlxf.agents.gtrxl.callbacks.MemoryCallback",
    "rlxf.evaluation.intervals.stratified_interquartile_mean",
    "rlxf.training.distributed.init_process_group",
)
"""Names that pages import from modules, as their packages do not export them."""

INTERFACES = ApiPage(
    "attention/interfaces.md",
    "Interfaces of techniques",
    "",
    summary="Base classes, for those who add a technique. "
    "[Contributing](../../../contributing.md#add-a-technique) lists the steps.",
)
INTERFACE_NAMES = (
    "rlxf.attention.technique.Technique",
    "rlxf.attention.positions.base.Position",
    "rlxf.attention.patterns.base.Pattern",
    "rlxf.attention.kernels.base.Kernel",
    "rlxf.attention.memory.base.Memory",
    "rlxf.attention.recurrent.base.Recurrence",
    "rlxf.attention.residuals.base.Residual",
    "rlxf.attention.depth.base.DepthController",
    "rlxf.attention.heads.base.OutputHead",
)


def public_names(package: str) -> list[str]:
    """Return the public names of a package: ``__all__``, or all that it exports except modules."""
    module = import_module(package)
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]


def defining_module(package: str, name: str) -> str:
    """Return the module of a public class or function, or the package of another public value."""
    return getattr(getattr(import_module(package), name), "__module__", package)


def names_of(page: ApiPage) -> list[str]:
    """Return the full names that a page documents, in the order of the package."""
    if not page.package:
        return list(FURTHER_NAMES if page == FURTHER else INTERFACE_NAMES)
    names = public_names(page.package)
    if page.package == "rlxf.attention":
        names = [name for name in names if _group(defining_module(page.package, name)) == page.below]
    return [f"{page.package}.{name}" for name in names]


def _group(module: str) -> str | None:
    """Return the package of an axis to which a module of `rlxf.attention` belongs, or None."""
    parts = module.split(".")
    return ".".join(parts[:3]) if len(parts) > 3 and parts[2] in AXES else None


def pages() -> dict[str, list[str]]:
    """Return uri -> full names of all pages of the API reference."""
    return {page.uri: names_of(page) for page in [*PAGES, FURTHER, INTERFACES]}


def markdown(page: ApiPage) -> str:
    """Return the Markdown of a page: heading, summary, table of names, one directive for each name."""
    summary = page.summary
    if summary is None:
        summary = first_paragraph(import_module(page.below or page.package))
    names = names_of(page)
    table = "\n".join(["| name | |", "|---|---|", *map(_row, names)])
    return "\n\n".join([f"# {page.title}", summary, table, *map(_directive, names)]) + "\n"


def _row(name: str) -> str:
    short = name.rpartition(".")[2]
    return f"| [`{short}`][{name}] | {first_paragraph(resolve(name), short).replace('|', '&#124;')} |"


def _directive(name: str) -> str:
    return f"::: {name}\n    options:\n      members: {'false' if is_technique(name) else 'null'}"


def resolve(name: str) -> Any:
    """Return the object of a full name."""
    package, _, short = name.rpartition(".")
    return getattr(import_module(package), short)


def is_technique(name: str) -> bool:
    """Return whether a name is a technique, whose interface is documented once, at its base class."""
    from rlxf.attention.technique import Technique

    value = resolve(name)
    return inspect.isclass(value) and issubclass(value, Technique) and name not in INTERFACE_NAMES


def first_paragraph(value: Any, name: str = "") -> str:
    """Return the first paragraph of a docstring in one line; empty for values such as constants."""
    if not isinstance(value, ModuleType | type) and not callable(value):
        return ""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def required_names() -> set[str]:
    """Return the full public names of all documented packages."""
    return {name for page in PAGES for name in names_of(page)}


def missing_names(required: Iterable[str], documented: Iterable[str]) -> Iterator[str]:
    """Yield a message for each required name that is not among the documented ones."""
    for name in sorted(set(required) - set(documented)):
        yield f"{name} is public, but has no entry in the API reference"
