"""Result of off-policy evaluation: the estimate with its interval and limitations."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from rlxf.utils.tables import Table, Tabular

Method = Literal["fqe", "dr", "wdr"]
METHODS: tuple[Method, ...] = get_args(Method)
NAMES = {"fqe": "fitted Q evaluation", "dr": "doubly robust", "wdr": "weighted doubly robust"}
"""Names of the methods in tables."""


@dataclass(frozen=True, repr=False)
class OffPolicyEstimate(Tabular):
    """Estimate of the expected discounted return ``sum_t gamma^t r_t`` of an agent from logged episodes.

    ``print(estimate)`` shows one line, ``print(estimate.table())`` and notebooks the table.

    Args:
        value: the estimate, in units of the rewards, averaged over the initial observations of the data.
        ci_low: lower end of the 95% interval.
        ci_high: upper end of the 95% interval.
        method: method that was used: "fqe", "dr" or "wdr". It is "fqe" if the requested one is undefined.
        discount: gamma.
        logged_value: mean discounted return of the logged episodes, up to their ends.
        effective_sample_size: number of episodes of the agent that would have the variance of the importance
            ratios; None for "fqe".
        target_return: target return of a return-conditioned agent; None for other agents.
        warnings: limitations of this estimate, as sentences.
    """

    value: float
    ci_low: float
    ci_high: float
    method: Method
    discount: float
    logged_value: float
    effective_sample_size: float | None = None
    target_return: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def ci(self) -> tuple[float, float]:
        """95% interval of the estimate."""
        return self.ci_low, self.ci_high

    def to_json(self) -> str:
        """Return all fields as JSON text."""
        return json.dumps(asdict(self), allow_nan=False)

    def __str__(self) -> str:
        return (
            f"estimated discounted return {self.value:.4g} ({NAMES[self.method]}, discount "
            f"{self.discount:g}), 95% interval {self.ci_low:.4g} to {self.ci_high:.4g}"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def table(self) -> Table:
        """Return the estimate as a table that ``print`` renders."""
        table = Table(title="Estimate from logged episodes", show_header=False)
        table.add_row("method", NAMES[self.method])
        table.add_row("discount", f"{self.discount:g}")
        if self.target_return is not None:
            table.add_row("target return", f"{self.target_return:g}")
        table.add_row("discounted return", f"{self.value:.4g}")
        table.add_row("95% interval", f"{self.ci_low:.4g} to {self.ci_high:.4g}")
        table.add_row("logged episodes", f"{self.logged_value:.4g}")
        if self.effective_sample_size is not None:
            table.add_row("effective sample size", f"{self.effective_sample_size:.1f} episodes")
        return table
