"""RecurrentPPO of sb3-contrib with the sizes of a shape."""

from typing import Any

from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.shapes import Shape


def recurrent_ppo(env: VecEnv, shape: Shape, **options: Any) -> RecurrentPPO:
    """Build a RecurrentPPO with the width, rollouts and minibatches of a shape.

    Other settings are RecurrentPPO's defaults: a separate LSTM for the critic, and two hidden layers of 64.
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
