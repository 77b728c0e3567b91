"""Pages of the API reference: public names of packages, and their Markdown for mkdocstrings."""

import inspect
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from website.names import canonical, defining_module, docstring, first_paragraph, public_names, resolve
from website.prose import prepared

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
    "rlxf.agents.decision_transformer.callbacks.ContextAttentionCallback",
    "rlxf.agents.gtrxl.callbacks.AttentionMapCallback",
    "rlxf.agents.gtrxl.callbacks.HistogramCallback",
    "rlxf.agents.gtrxl.callbacks.MemoryCallback",
    "rlxf.agents.inspection.EpisodeAttention",
    "rlxf.agents.inspection.EpisodeInspector",
    "rlxf.agents.inspection.episode_inspector",
    "rlxf.evaluation.intervals.stratified_interquartile_mean",
    "rlxf.evaluation.rollout.play",
    "rlxf.training.trackers.attach_tracker",
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

ALL_PAGES = [*PAGES, FURTHER, INTERFACES]


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


@cache
def owned() -> dict[str, list[str]]:
    """Return uri -> full names that have their entry on a page.

    A name that several packages export has its entry on the page of the most specific one: `rlxf` comes last.
    """
    seen: set[str] = set()
    entries: dict[str, list[str]] = {}
    for page in [*PAGES[1:], FURTHER, INTERFACES, PAGES[0]]:
        entries[page.uri] = [name for name in names_of(page) if canonical(name) not in seen]
        seen |= {canonical(name) for name in entries[page.uri]}
    return entries


@cache
def short_names() -> dict[str, str]:
    """Return short -> full name of all entries."""
    return {name.rpartition(".")[2]: name for names in owned().values() for name in names}


def full_name(reference: str) -> str | None:
    """Return the full name of a class, function or member in text that has no scope, or None."""
    first, _, rest = reference.partition(".")
    base = short_names().get(first)
    return f"{base}.{rest}" if base and rest else base


@cache
def _full_names() -> dict[str, str]:
    return {canonical(name): name for names in owned().values() for name in names}


def markdown(page: ApiPage) -> str:
    """Return the Markdown of a page: heading, summary, table of names, one directive for each entry."""
    summary = page.summary
    if summary is None:
        summary = first_paragraph(import_module(page.below or page.package).__doc__ or "")
    table = "\n".join(["| name | summary |", "|---|---|", *map(_row, names_of(page))])
    directives = [_directive(name, page) for name in owned()[page.uri]]
    return "\n\n".join([f"# {page.title}", prepared(summary, full_name), table, *directives]) + "\n"


def _row(name: str) -> str:
    short, summary = name.rpartition(".")[2], prepared(first_paragraph(docstring(name)), full_name)
    return f"| [`{short}`][{_full_names()[canonical(name)]}] | {summary} |"


def _directive(name: str, page: ApiPage) -> str:
    options = []
    if is_technique(name):
        options = ["members: []", "inherited_members: false", "show_bases: false"]
    elif _has_base_on(page, name):
        options = ["inherited_members: false"]
    return "\n".join(
        [f"::: {name}", *(["    options:"] if options else []), *(f"      {o}" for o in options)]
    )


def _has_base_on(page: ApiPage, name: str) -> bool:
    """Return whether a base class has its entry on the same page, with the members that a class inherits."""
    value = resolve(name)
    bases = (
        {f"{base.__module__}.{base.__qualname__}" for base in value.__mro__[1:]}
        if inspect.isclass(value)
        else set()
    )
    return bool(bases & {canonical(other) for other in owned()[page.uri]})


def is_technique(name: str) -> bool:
    """Return whether a name is a technique, whose interface is documented once, at its base class."""
    from rlxf.attention.technique import Technique

    value = resolve(name)
    return inspect.isclass(value) and issubclass(value, Technique) and name not in INTERFACE_NAMES


def required_names() -> set[str]:
    """Return the full public names of all documented packages."""
    return {name for page in PAGES for name in names_of(page)}
