"""Table that compares several reports."""

from collections.abc import Mapping

from rlxf.evaluation.report import Report, explain_scores
from rlxf.utils.tables import Table


def compare(reports: Mapping[str, Report], title: str, heading: str) -> Table:
    """Return a table with a row per report: episodes, returns, and success rate and score if available.

    Nothing is averaged over rows, so the table can compare the last and the best checkpoint of a run.

    Args:
        reports: reports by name, at least one.
        title: title of the table.
        heading: heading of the column of names.

    Returns:
        A table that ``print`` renders.
    """
    columns = {name: cell for name, cell in COLUMNS.items() if any(map(cell, reports.values()))}
    table = Table(heading, *columns, title=title)
    for name, report in reports.items():
        table.add_row(name, *(cell(report) for cell in columns.values()))
    references = [report.references for report in reports.values() if report.references is not None]
    if references:
        table.caption = explain_scores(references[0])
    return table


def _success(report: Report) -> str:
    return "" if report.success_rate is None else f"{report.success_rate:.1%}"


def _score(report: Report) -> str:
    return "" if report.normalized_score is None else f"{report.normalized_score:.1f}"


COLUMNS = {
    "episodes": lambda report: str(report.episodes),
    "mean return": lambda report: f"{report.mean:.4g}",
    "95% interval": lambda report: "{:.4g} to {:.4g}".format(*report.ci),
    "IQM": lambda report: f"{report.iqm:.4g}",
    "success": _success,
    "normalised score": _score,
}
