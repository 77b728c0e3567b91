"""Behavior policy of logged episodes with discrete actions, estimated by behavior cloning."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from rlxf.agents.common.actions import DiscreteActions, action_encoder
from rlxf.agents.common.losses import cross_entropies
from rlxf.agents.common.numerics import clip_grad_norm_checked
from rlxf.data import Trajectories
from rlxf.off_policy_evaluation.networks import EnsembleMLP, StepFeatures

UPDATES, BATCH_SIZE, LEARNING_RATE, WIDTH = 2000, 256, 1e-3, 64
"""Settings of the clone: Adam with a learning rate that decreases linearly to 0."""
MIN_PROBABILITY = 1e-3
"""Smallest estimated probability of a logged action; it bounds the importance ratio of a step by 1000."""


def estimate_behavior(
    data: Trajectories, seed: int = 0, device: torch.device | str = "cpu", updates: int = UPDATES
) -> NDArray[np.float64]:
    """Return the estimated probability mu(a_t | s_t) of each logged action, (N,), at least `MIN_PROBABILITY`.

    A network with one softmax for each discrete component is trained by cross-entropy on the logged actions.
    It observes s_t only, so it averages over different behavior policies and over what they remember. The
    estimate from the same data often has a lower error than the true probabilities (Hanna et al. 2019,
    arXiv:1806.01347).

    Args:
        data: logged episodes with Discrete, MultiDiscrete or MultiBinary actions.
        seed: seed of weights and batches.
        device: device of the network.
        updates: gradient steps.
    """
    generator = torch.Generator().manual_seed(seed)
    encoder = action_encoder(data.action_space)
    features = StepFeatures(data)
    assert isinstance(encoder, DiscreteActions)
    sizes = encoder.sizes
    choices = encoder.to_choices(torch.from_numpy(np.array(data.actions)))
    network = EnsembleMLP(1, features.width, WIDTH, sum(sizes), generator).to(device)

    def negative_log_probability(steps: torch.Tensor) -> torch.Tensor:
        logits = network(features(steps.numpy())[None].to(device))[0].split(sizes, dim=-1)
        return cross_entropies(logits, choices[steps].to(device))

    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - update / updates)
        loss = negative_log_probability(torch.randint(data.steps, (BATCH_SIZE,), generator=generator)).mean()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_checked({"loss": loss}, network, network.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        parts = [negative_log_probability(steps).cpu() for steps in torch.arange(data.steps).split(8192)]
    return np.maximum(torch.cat(parts).double().neg().exp().numpy(), MIN_PROBABILITY)


def check_probabilities(probabilities: ArrayLike, data: Trajectories) -> NDArray[np.float64]:
    """Return given behavior probabilities as float64 (N,).

    Raises:
        ValueError: if there is not one for each step, or one is not above 0 and at most 1.
    """
    try:
        values = np.asarray(probabilities, np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"behavior_probabilities must be the probability of each logged action, {data.steps} numbers "
            f"above 0 and at most 1; got {type(probabilities).__name__}"
        ) from None
    if values.shape != (data.steps,) or not ((values > 0) & (values <= 1)).all():
        raise ValueError(
            f"behavior_probabilities must be the probability of each logged action, above 0 and at most 1, "
            f"with shape ({data.steps},); got shape {values.shape} with values from "
            f"{values.min(initial=np.inf):g} to {values.max(initial=-np.inf):g}"
        )
    return values
