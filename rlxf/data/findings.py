"""Findings: properties of a dataset that affect the training, each as a text with its consequence."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlxf.data.encoders import MIN_IMAGE_SIZE
from rlxf.data.spaces import is_image, is_text, leaves
from rlxf.data.step_statistics import NARROW_FRACTION, ActionStatistics
from rlxf.utils.env_ids import is_other_version
from rlxf.utils.warnings import warn_user

if TYPE_CHECKING:
    from rlxf.data.dataset_report import DatasetReport
    from rlxf.data.trajectories import Trajectories

FEW_EPISODES = 10
"""With fewer episodes, the best 10% are less than one episode."""
EQUAL_RETURNS = 1e-6
"""Relative difference up to which returns count as equal; rounding of float32 sums causes it."""
MANY_TIME_STEPS = 10_000
"""Length of episodes above which an embedding for each time step is reported."""
LISTED = 8
"""Maximum number of values that a sentence lists."""


class Episodes(Protocol):
    """Protocol of the results of E episodes, such as `Trajectories` and `DatasetReport`."""

    @property
    def returns(self) -> NDArray[np.float32]:
        """Return of each episode, float32 (E,)."""

    @property
    def terminated(self) -> NDArray[np.bool_]:
        """True if the episode ended in a terminal state, bool (E,)."""

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """True if the episode was truncated, bool (E,)."""


UNUSED_REWARDS = (
    "in the last step of an episode that is not terminated; such a step has no value target, because the "
    "observation after it is not known: mark these ends as terminations if the episodes end there, for "
    "example at a goal"
)
LARGE_FRACTION = 0.1
"""Fraction of unused rewards above which a warning reports them.

With a time limit of ten steps or more, it is less.
"""


def unused_rewards(rewards: NDArray[np.float32], complete: NDArray[np.bool_]) -> str | None:
    """Find rewards that no value target contains, if they are a large fraction by absolute value.

    Args:
        rewards: rewards of the steps, (N,).
        complete: `rlxf.data.Trajectories.complete_transitions` of the steps, (N,).
    """
    sizes = np.abs(rewards, dtype=np.float64)
    fraction = sizes[~complete].sum() / max(sizes.sum(), np.finfo(np.float64).tiny)
    if fraction <= LARGE_FRACTION:
        return None
    return f"{fraction:.0%} of the rewards, by absolute value, are {UNUSED_REWARDS}"


NO_RETURN = "check that the rewards were recorded, since a critic refuses data whose rewards are all 0"
"""Advice for data in which all returns are 0."""


def differ_beyond_rounding(returns: NDArray[np.float32]) -> bool:
    """Return whether returns (E,) are not all the same, up to the rounding of float32 sums."""
    low, high = float(returns.min()), float(returns.max())
    return high - low > EQUAL_RETURNS * max(abs(low), abs(high))


def equal_returns(data: Episodes) -> str | None:
    """Find returns that are equal in all episodes, which makes conditioning on the return meaningless.

    The sentence also names the cause if all returns are 0: the rewards may be missing.
    """
    if differ_beyond_rounding(data.returns):
        return None
    low = float(data.returns.min())
    episodes = len(data.returns)
    who = f"all {episodes} episodes have" if episodes > 1 else "the only episode has"
    cause = "" if np.any(data.returns) else f"{NO_RETURN}; otherwise "
    return (
        f"{who} the return {low:g}, so the data do not show how actions depend on the return: whatever the "
        f"target return, an agent without a critic clones the behavior in the data; {cause}use {low:g} as "
        f"target return, or add episodes with other returns"
    )


def missing_ends(data: Episodes) -> str | None:
    """Find episodes that end neither terminated nor truncated: their recording stopped in the middle."""
    neither = int(np.count_nonzero(~(data.terminated | data.truncated)))
    if not neither:
        return None
    return (
        f"{neither:,} of {len(data.returns):,} episodes end neither terminated nor truncated: training takes "
        f"their last recorded step as their end, so returns-to-go lack later rewards; mark these ends "
        f"as truncations if the recording stopped there, else as terminations"
    )


def warn_of_returns(data: Episodes, allows_equal_returns: bool) -> None:
    """Warn about data on which an agent cannot be conditioned on the return as intended.

    Args:
        data: the training data.
        allows_equal_returns: False if the agent refuses such data, or needs no return.

    Warns:
        UserWarning: for the findings `equal_returns`, if they are allowed, and `missing_ends`.
    """
    for find in (equal_returns, missing_ends) if allows_equal_returns else (missing_ends,):
        if sentence := find(data):
            warn_user(sentence)


def few_episodes(report: "DatasetReport") -> str | None:
    """Find datasets of fewer than `FEW_EPISODES` episodes."""
    if report.episodes >= FEW_EPISODES:
        return None
    return (
        f"the number of episodes is {report.episodes}: an agent most likely memorizes them, and the best "
        f"10% are less than one episode"
    )


def no_terminations(report: "DatasetReport") -> str | None:
    """Find data without a terminal state. A critic refuses data whose episodes are not truncated, either."""
    if report.terminated.any():
        return None
    others = "return-conditioned agents and behavior cloning do not need terminations"
    if not report.truncated.any():
        return f"no episode is terminated or truncated: a critic refuses these data; {others}"
    return (
        f"no episode terminates: a critic cannot learn which states end an episode and bootstraps at every "
        f"end; {others}"
    )


def uniform_rewards(report: "DatasetReport") -> str | None:
    """Find rewards that are equal in all or nearly all steps. If all are 0, `equal_returns` reports them."""
    rewards = report.rewards
    if rewards.constant and rewards.common:
        return (
            f"the reward is {rewards.common:g} in every step, so the return of an episode is proportional to "
            f"its length: a target return is a target length"
        )
    if rewards.nearly_constant and rewards.common:
        return (
            f"the reward is {rewards.common:g} in nearly every step: apart from other rewards, the "
            f"return-to-go is {rewards.common:g} times the number of remaining steps, so a target return is "
            f"mostly a target length"
        )
    if rewards.nearly_constant:
        return (
            "rewards are sparse, nearly all are 0: the return-to-go says little about a single action, and a "
            "critic needs many updates until rewards affect early steps"
        )
    return None


def constant_actions(report: "DatasetReport") -> str | None:
    """Find actions, or components of them, that never change."""
    constant = report.actions.constant
    components = len(report.actions.minimum)
    if not constant:
        return None
    if len(constant) == components:
        return "all actions are equal: a trained agent repeats this action, whatever the observation"
    return (
        f"{len(constant)} of {components} action components are constant ({_listed(constant)}, counted from "
        f"0): a trained agent repeats these values, whatever the observation"
    )


def narrow_actions(report: "DatasetReport") -> str | None:
    """Find components of Box actions that use a small fraction of the range between their bounds."""
    return _describe_narrow(report.actions)


def warn_of_narrow_actions(data: "Trajectories") -> None:
    """Warn about training data with the finding `narrow_actions`.

    Warns:
        UserWarning: if there are such components.
    """
    if isinstance(data.action_space, spaces.Box):
        sentence = _describe_narrow(ActionStatistics.of(data.actions, data.action_space))
        if sentence:
            warn_user(sentence)


def _describe_narrow(actions: ActionStatistics) -> str | None:
    """Return the finding about narrow actions, in several sentences; None if there are none."""
    if not actions.narrow:
        return None
    first = actions.narrow[0]
    used = f"{actions.minimum[first]:g} to {actions.maximum[first]:g}"
    return (
        f"the action components {_listed(actions.narrow)}, counted from 0, use less than "
        f"{NARROW_FRACTION:.0%} of the range between their bounds: component {first} has values from {used}, "
        f"and the bounds {actions.low[first]:g} and {actions.high[first]:g}. Agents scale actions by the "
        f"bounds, so a small error of a scaled action is large compared with the actions of the data. Give "
        f"the dataset an action_space with narrower bounds, and the environment, too, for example with "
        f"gymnasium.wrappers.TransformAction"
    )


def unused_actions(report: "DatasetReport") -> str | None:
    """Find discrete actions that never occur."""
    unused = report.actions.unused
    if not unused:
        return None
    if len(report.actions.minimum) == 1:
        what = f"the actions {_listed(unused[0])} never occur"
    else:
        what = f"some values of the action components {_listed(list(unused))}, counted from 0, never occur"
    return f"{what}: the data do not show their consequences, and a trained agent hardly ever takes them"


def nearly_constant_features(report: "DatasetReport") -> str | None:
    """Find features of observations whose variation is lost in the rounding of float32."""
    features = report.nearly_constant_features
    if not features:
        return None
    return (
        f"the observation features {_listed(features)}, counted from 0, vary by no more than the rounding of "
        f"float32: agents do not scale them, and hardly see the variation; if it matters, record the "
        f"difference from a reference value"
    )


def lossy_images(report: "DatasetReport") -> str | None:
    """Find images that are stored as JPEG."""
    if not report.lossy_images:
        return None
    return (
        "images are stored as JPEG: an agent is trained on images that differ slightly from those of the "
        "environment in which it acts"
    )


def text_observations(report: "DatasetReport") -> str | None:
    """Find text in the observations, which is not encoded."""
    texts = [path for path, leaf in leaves(report.observation_space, "observation") if is_text(leaf)]
    if not texts:
        return None
    return f"{', '.join(texts)} is text, which is left out: an agent cannot use the information in it"


def flattened_images(report: "DatasetReport") -> str | None:
    """Find observations that look like images but are encoded as vectors."""
    return _describe_flattened(report.observation_space)


def warn_of_flattened_images(data: "Trajectories") -> None:
    """Warn about training data with the finding `flattened_images`.

    Warns:
        UserWarning: if the observations look like images but are encoded as vectors.
    """
    if sentence := _describe_flattened(data.observation_space):
        warn_user(sentence)


def _describe_flattened(space: spaces.Space[Any]) -> str | None:
    """Return the finding about a Box with three axes, two of them as long as those of images.

    As Stable-Baselines3 does, a convolution takes the smallest axis for that of the channels, which is the
    first or the last one.
    """
    shape = space.shape or ()
    if not isinstance(space, spaces.Box) or len(shape) != 3 or is_image(space):
        return None
    if sorted(shape)[1] < MIN_IMAGE_SIZE or np.argmin(shape) == 1:
        return None
    return (
        f"observations of shape {shape} and dtype {space.dtype} are flattened to {math.prod(shape):,} "
        f"numbers, since only a uint8 Box from 0 to 255 is an image: store uint8 from 0 to 255 to use "
        f"a convolution"
    )


def no_environment(report: "DatasetReport") -> str | None:
    """Find data without an environment for evaluations."""
    if report.eval_env_id is not None:
        return None
    reason = describe_missing_environment(report.env_ids)
    return f"the data {reason}: evaluations need an environment, --env ID or in Python env=..."


def describe_missing_environment(env_ids: Sequence[str]) -> str:
    """Return why data have no environment for evaluations, as a predicate of "the data".

    Args:
        env_ids: ids of the recorded environments. If there are some, their descriptions differ, possibly only
            in their arguments.
    """
    if not env_ids:
        return "do not name their environment"
    return f"have different descriptions of their environments ({', '.join(env_ids)})"


def other_versions(report: "DatasetReport") -> str | None:
    """Find an evaluation environment of another version than the recorded ones, or recorded ones that differ.

    Dynamics and rewards may differ between versions.
    """
    ids = dict.fromkeys((*report.env_ids, *filter(None, [report.eval_env_id])))
    if not any(is_other_version(one, other) for one in ids for other in ids):
        return None
    return (
        f"the data name several versions of an environment, {', '.join(ids)}: dynamics and rewards may "
        f"differ, so returns are not comparable between them"
    )


def long_episodes(report: "DatasetReport") -> str | None:
    """Find episodes that are longer than the time limit of the environment."""
    longest = int(report.lengths.max())
    limit = report.max_episode_steps or math.inf
    if longest <= limit:
        return None
    return (
        f"episodes have up to {longest:,} steps, but the time limit of the environment is {limit:,}: "
        f"evaluations end earlier, so their returns are not comparable with those of the data"
    )


def many_time_steps(report: "DatasetReport") -> str | None:
    """Find episodes of so many time steps that an embedding for each of them takes much memory."""
    longest = int(report.lengths.max())
    if longest <= MANY_TIME_STEPS:
        return None
    return (
        f"the longest episode has {longest:,} steps: a transformer over trajectories has an embedding for "
        f"each time step; with episode_length={MANY_TIME_STEPS}, later steps share the last one"
    )


def _listed(values: list[int]) -> str:
    more = ["..."] if len(values) > LISTED else []
    return ", ".join([*map(str, values[:LISTED]), *more])


FINDINGS: tuple[Callable[["DatasetReport"], str | None], ...] = (
    *(equal_returns, missing_ends, few_episodes, no_terminations, uniform_rewards, constant_actions),
    *(narrow_actions, unused_actions, nearly_constant_features, lossy_images, text_observations),
    *(flattened_images, no_environment, other_versions, long_episodes, many_time_steps),
)
"""Functions that return a sentence about a report, or None."""
