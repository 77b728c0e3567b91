"""``rlxf estimate``: estimate the return of the agent of a run from logged episodes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from rlxf.cli.options import Command, Device, Trust, check_counts, check_options_not_negative, options

if TYPE_CHECKING:
    from rlxf.cli.runs import Agent
    from rlxf.data import Trajectories
    from rlxf.training import RunFolder


@options
class Estimate(Command):
    """Estimate the return of the agent of a run from logged episodes, without playing in its environment.

    The estimate is the discounted return from the first observations of the data, for episodes that end in
    terminal states only. It is not comparable with the undiscounted returns of "rlxf evaluate", except in its
    order of agents. Undiscounted estimates need data whose episodes all terminate, and --discount 1.

    Example: rlxf estimate runs/dt-cartpole-random-v0-0 --updates 500 --discount 0.9
    """

    run: Positional[Path]
    """Folder of the run."""
    dataset: tuple[str, ...] = ()
    """Minari ids of the logged episodes, with the spaces of the agent.
    By default the training data of an agent trained on a dataset, from which estimates are biased
    upward."""
    method: Literal["fqe", "dr", "wdr"] = "fqe"
    """Fitted Q evaluation, doubly robust, or weighted doubly robust.
    The last two need discrete actions; with continuous ones, fqe is used and a warning is printed."""
    checkpoint: Literal["last", "best", "validation", "all"] = "last"
    """Checkpoint to estimate: the last one, the best one of the evaluations during training, the one with the
    lowest validation loss (--validation-fraction), or all of them."""
    target_returns: tuple[float, ...] = ()
    """Target returns for an agent that is conditioned on a return, one estimate each.
    By default the target is the largest return in its training data."""
    discount: float = 0.99
    """Discount factor gamma, above 0 and at most 1."""
    updates: int = 20_000
    """Gradient steps of fitted Q evaluation; at least 150 / (1 - discount) are advisable."""
    members: int = 5
    """Number of Q functions in the ensemble, at least 2; more give a more precise interval."""
    deterministic: bool = True
    """Estimate the policy of the most likely actions instead of the stochastic policy."""
    seed: int = 0
    """Seed of all random numbers."""
    trust: Trust = False
    progress_bar: bool = True
    """Show progress bars."""
    device: Device = "auto"

    def prepare(self) -> Callable[[], None]:
        """Load the agents and the episodes, check all options, and return the estimation to run."""
        from rlxf.cli.reports import default_target_returns, select_checkpoints
        from rlxf.cli.runs import load_agent_alone
        from rlxf.data import load_trajectories
        from rlxf.off_policy_evaluation.fitted_q import FittedQConfig, check_data
        from rlxf.off_policy_evaluation.policy_replay import check_replayable
        from rlxf.training import RunFolder

        check_counts(self, "updates", "members")
        check_options_not_negative(self, "seed")
        FittedQConfig(discount=self.discount, updates=self.updates, members=self.members)
        run = RunFolder.open(self.run)
        files = select_checkpoints(run, self.checkpoint)
        ids = self.dataset or run.config.get("dataset")
        if not ids:
            raise ValueError(f"{run.path} was not trained on a dataset: pass logged episodes, --dataset ID")
        data = load_trajectories(list(ids))
        check_data(data, self.discount)
        agents = {name: load_agent_alone(run, path, self.device, self.trust) for name, path in files.items()}
        for agent in agents.values():
            check_replayable(agent, data)
        targets = default_target_returns(list(agents.values()), self.target_returns)
        return partial(self._estimate, run, agents, data, targets or (None,))

    def _estimate(
        self,
        run: "RunFolder",
        agents: "Mapping[str, Agent]",
        data: "Trajectories",
        targets: Sequence[float | None],
    ) -> None:
        from rlxf.cli.output import report_errors
        from rlxf.cli.reports import print_titled
        from rlxf.off_policy_evaluation import estimate_return
        from rlxf.training import NumericalError

        for name, agent in agents.items():
            for target in targets:
                with report_errors(NumericalError):  # e.g. Q functions that diverge
                    estimate = estimate_return(
                        agent,
                        data,
                        self.method,
                        target_return=target,
                        discount=self.discount,
                        updates=self.updates,
                        members=self.members,
                        deterministic=self.deterministic,
                        seed=self.seed,
                        device=self.device,
                        progress_bar=self.progress_bar,
                    )
                print_titled(estimate.table(), run, name, agent)
