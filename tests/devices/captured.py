"""Checks of captured updates, for a process that has an accelerator."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.common import gradient_programs, module_programs
from rlxf.agents.gtrxl import compiled_losses as ppo
from rlxf.agents.gtrxl.training_algorithm import PPOTraining
from rlxf.agents.offline import algorithm
from rlxf.attention import TransformerSpec
from tests.agents.decision_transformer.worlds import SIZES, some_trajectories
from tests.agents.techniques import CHOICES, DEPEND_ON_VALUES, Options, merged_choices
from tests.devices import accelerator, recorded_graph
from tests.devices.accelerator import NAME
from tests.devices.agents import check_weights, gtrxl_agent, offline_agent

CAPTURED_OFFLINE = (
    "target return",
    "MaxReturn",
    "ElasticHistory",
    "HighestValueReturn",
    "SampledReturn",
    "QRegularized",
    "MaximumEntropy",
    "auxiliary losses",
    "discrete actions",
    "weight averaging",
    "BehaviorCloning",
    "ReturnConditionedMLP",
)
"""Cases of `OFFLINE` whose updates can be captured."""
DRAWING = ("HighestValueReturn", "QRegularized", "MaximumEntropy")
"""Cases whose losses draw random numbers, which a GPU captures only if they are its own."""
NOT_CAPTURED_OFFLINE = ("XLRelative", "context episode")
"""Other cases, which read values of tensors."""
CAPTURED = (
    "default core",
    "GatedDeltaNet",
    "use_sde",
    "Box actions",
    "target_kl",
    "images",
    "Dict observations",
    "recomputed memory",
    "memory across episodes",
)
"""Cases of `GTRXL` whose updates can be captured."""
NOT_CAPTURED = {
    "Compressive": "the branches of the memory",
    "KNN": "the branches of the memory",
    "RMT": "the branches of the memory",
    "Longformer": "the branches of the pattern",
    "CALM": "cannot be captured as a CUDA graph",
}
"""Other cases, with a part of the reason."""


@contextmanager
def captures() -> Iterator[list[Any]]:
    """List captures; on the simulated device, simulate them."""
    made: list[Any] = []
    real = recorded_graph.capture if accelerator.IS_SIMULATED else gradient_programs.capture

    def capture(run: Any, device: torch.device) -> Any:
        made.append(run)
        return real(run, device)

    supports = patch.object(module_programs, "supports_graphs", lambda device: True)
    with supports, patch.object(gradient_programs, "capture", capture):
        yield made


def capturing_agent(case: str, **changes: Any) -> GTrXLPPO:
    """Return an agent on the device whose updates are captured."""
    agent = gtrxl_agent(case, NAME, **changes)
    agent._algorithm = PPOTraining(agent.policy, agent.order, compiles=True)
    return agent


def check_captured(case: str) -> None:
    """Compare an agent with captured updates with one on the CPU; all minibatches have the same shape."""
    with captures() as made, accelerator.random_numbers_of_cpu(), warnings.catch_warnings():
        warnings.filterwarnings("error", "updates are not captured")
        own = capturing_agent(case).learn(16)
    check_weights(own, gtrxl_agent(case, "cpu").learn(16))
    assert len(made) == 1


def learn_offline(case: str) -> Any:
    """Return an offline agent on the device that was trained for 4 updates, which are captured."""
    with patch.object(algorithm, "supports_graphs", lambda device: True):
        return offline_agent(case, NAME).learn(4)


def check_captured_offline(case: str) -> None:
    """Compare an offline agent with captured updates with one on the CPU."""
    compares = accelerator.IS_SIMULATED or case not in DRAWING
    numbers = accelerator.random_numbers_of_cpu() if compares else nullcontext()
    with captures() as made, numbers, warnings.catch_warnings():
        warnings.filterwarnings("error", "updates are not captured")
        own = learn_offline(case)
    if compares:
        check_weights(own, offline_agent(case, "cpu").learn(4))
    assert all(x.isfinite().all() for x in own.policy.parameters())
    assert len(made) == 1


def core_with(choice: Options) -> TransformerSpec:
    """Return a small core of a Decision Transformer with options."""
    return TransformerSpec(**SIZES, **choice)


TECHNIQUES_NOT_CAPTURED = {name: reason for reason, names in DEPEND_ON_VALUES.items() for name in names}
"""Option -> part of the reason."""
TECHNIQUES_CAPTURED = merged_choices(
    [name for name in CHOICES if name not in TECHNIQUES_NOT_CAPTURED], core_with
)


def check_techniques(choice: str) -> None:
    """Compare a Decision Transformer that is captured, if its techniques permit it, with one that is not."""
    core = core_with((TECHNIQUES_CAPTURED | CHOICES)[choice])
    settings: dict[str, Any] = {"core": core, "context_length": 5}
    settings |= {"batch_size": 8, "seed": 3, "learning_rate": 1e-2, "warmup_updates": 0, "device": NAME}
    recorded = warnings.catch_warnings(record=True)
    with captures() as made, accelerator.random_numbers_of_cpu(), recorded as caught:
        warnings.simplefilter("always")
        with patch.object(algorithm, "supports_graphs", lambda device: True):
            own = DecisionTransformer(some_trajectories(), **settings).learn(4)
        assert bool(made) == (choice in TECHNIQUES_CAPTURED)
        if not made:  # the other agent would be trained in the same way
            messages = [
                str(each.message) for each in caught if "updates are not captured" in str(each.message)
            ]
            assert any(TECHNIQUES_NOT_CAPTURED[choice] in message for message in messages)
            return
        other = DecisionTransformer(some_trajectories(), cuda_graphs=False, **settings).learn(4)
    for one, expected in zip(own.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), expected.cpu(), rtol=1e-3, atol=1e-4)


def check_pretrained_between_updates() -> None:
    """Assert that a return scale that `load_pretrained` changes between updates is used."""
    source = offline_agent("target return", "cpu")
    source.return_scale = source.policy.tokens.return_scale = 50.0

    def load_once(variables: Any, _: Any) -> bool:
        if variables["self"].num_timesteps == 2:
            variables["self"].load_pretrained(source)
        return True

    with captures() as made, patch.object(algorithm, "supports_graphs", lambda device: True):
        own = offline_agent("target return", NAME).learn(4, callback=load_once)
    check_weights(own, offline_agent("target return", "cpu").learn(4, callback=load_once))
    assert len(made) == 2


def offline_reason(case: str) -> str:
    """Return the warning of an offline agent that cannot be captured, which equals one on the CPU."""
    with captures(), accelerator.random_numbers_of_cpu(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = learn_offline(case)
    check_weights(own, offline_agent(case, "cpu").learn(4))
    return next(str(each.message) for each in caught if "updates are not captured" in str(each.message))


def check_new_parameters() -> None:
    """Assert that losses are captured again after parameters were replaced."""
    with captures() as made:
        agent = capturing_agent("default core").learn(16)
        agent.policy.value_net.weight = torch.nn.Parameter(agent.policy.value_net.weight.detach().clone())
        agent.learn(16, reset_num_timesteps=False)
    assert len(made) == 2


def check_irregular_batches() -> None:
    """Compare an agent with reset steps, for which not all minibatches are regular, with the CPU."""
    regular: list[bool] = []
    real = ppo.has_consecutive_steps

    def has_consecutive_steps(batch: Any) -> bool:
        regular.append(real(batch))
        return regular[-1]

    record = patch.object(ppo, "has_consecutive_steps", has_consecutive_steps)
    with captures(), record, accelerator.random_numbers_of_cpu():
        own = capturing_agent("reset steps").learn(16)
    check_weights(own, gtrxl_agent("reset steps", "cpu").learn(16))
    assert not all(regular)


def reason(case: str) -> str:
    """Return the warning of an agent whose updates cannot be captured, which equals one on the CPU."""
    with captures(), accelerator.random_numbers_of_cpu(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = capturing_agent(case).learn(16)
    check_weights(own, gtrxl_agent(case, "cpu").learn(16))
    return next(str(each.message) for each in caught if "updates are not captured" in str(each.message))
