"""TensorBoard's HPARAMS tab shows the runs of both agents in one log folder."""

import pytest
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.decision_transformer import decision_transformer
from tests.datasets import record_random


def learn_online(folder):
    sizes = {"memory_length": 4, "n_steps": 8, "segment_length": 8, "batch_size": 16, "n_envs": 2}
    GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", tensorboard_log=str(folder / "online"), **sizes).learn(32)


def learn_offline(folder):
    core = decision_transformer(width=8, layers=1, heads=1)
    agent = DecisionTransformer(
        "test/some-v0", context_length=2, core=core, tensorboard_log=str(folder / "offline")
    )
    agent.learn(2, log_interval=1)


@pytest.fixture(params=[(learn_online, learn_offline), (learn_offline, learn_online)], ids=["first", "last"])
def log_folder(request, tmp_path, minari_root):
    """Return log folders with runs of both agents, in either order."""
    record_random((4, 3), "test/some-v0")
    folder = tmp_path / "log"
    for number, learn in enumerate(request.param):
        learn(folder / str(number))
    return folder


class Tab:
    """Requests of the tab to its server."""

    def __init__(self, folder):
        runs = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
        provider = MultiplexerDataProvider(runs, str(folder))
        shared = base_plugin.TBContext(data_provider=provider, logdir=str(folder))
        self.backend = backend_context.Context(shared)

    def experiment(self):
        """Return the columns."""
        request = api_pb2.GetExperimentRequest(include_metrics=True)
        return get_experiment.Handler(context.RequestContext(), self.backend, "", request).run()

    def rows(self):
        """Return the runs by agent."""
        columns = [api_pb2.ColParams(hparam=info.name) for info in self.experiment().hparam_infos]
        request = api_pb2.ListSessionGroupsRequest(
            start_index=0,
            slice_size=100,
            col_params=columns,
            allowed_statuses=[status for _, status in api_pb2.Status.items()],
            include_metrics=True,
        )
        handler = list_session_groups.Handler(context.RequestContext(), self.backend, "", request)
        groups = handler.run().session_groups
        return {group.hparams["algorithm"].string_value: group for group in groups}


def test_each_agent_has_its_columns(log_folder):
    columns = {info.name for info in Tab(log_folder).experiment().hparam_infos}
    assert {"gamma", "clip_range", "n_steps"} <= columns  # of GTrXLPPO alone
    assert {"context_length", "dataset", "return_scale"} <= columns  # of DecisionTransformer alone
    assert {"learning_rate", "width", "algorithm"} <= columns


def test_each_run_has_its_values(log_folder):
    rows = Tab(log_folder).rows()
    assert rows.keys() == {"GTrXLPPO", "DecisionTransformer"}
    assert rows["GTrXLPPO"].hparams["gamma"].number_value == 0.99
    assert rows["DecisionTransformer"].hparams["context_length"].number_value == 2
    assert rows["DecisionTransformer"].hparams["dataset"].string_value == "test/some-v0"
    assert "context_length" not in rows["GTrXLPPO"].hparams


def test_last_scalars_are_metrics(log_folder):
    rows = Tab(log_folder).rows().items()
    tags = {name: {metric.name.tag for metric in group.metric_values} for name, group in rows}
    assert "train/loss" in tags["DecisionTransformer"]
    assert "train/value_loss" in tags["GTrXLPPO"]
