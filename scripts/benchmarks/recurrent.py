"""RecurrentPPO of sb3-contrib at the sizes of a shape."""

from typing import Any

from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.shapes import Shape


def recurrent_ppo(env: VecEnv, shape: Shape, **options: Any) -> RecurrentPPO:
    """An LSTM with as many hidden units as the shape is wide, rollouts and minibatches as the shape's.

    All else is RecurrentPPO's default: its own LSTM for the critic, two hidden layers of 64 on each.
    """
    return RecurrentPPO(
        "MlpLstmPolicy",
        env,
        n_steps=shape.steps,
        batch_size=shape.minibatch,
        n_epochs=shape.epochs,
        policy_kwargs={"lstm_hidden_size": shape.width},
        **options,
    )
