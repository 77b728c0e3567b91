"""Recording of environments that fail."""

from contextlib import closing

import numpy as np
import pytest

from rlxf.collection.recording import Recorder
from tests.envs.workers.worlds import breaking


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")
def test_only_episodes_lost_to_a_failure_are_left_out(tmp_path):
    ended, recorded = [], []
    with closing(breaking(tmp_path, "step raises", "step dies", restarts=9)) as env:
        recorder = Recorder(env)
        recorder.reset()
        while env.restarts < 2 or env.failed_envs() or len(ended) < 30:
            *_, infos = recorder.step(np.zeros(3, np.int64))
            ended += [(i, info["episode"]) for i, info in enumerate(infos) if "episode" in info]
            recorded += recorder.pop_finished()
    assert [i for i, _ in ended] == [i for i, _ in recorded]
    for (_, info), (_, episode) in zip(ended, recorded, strict=True):
        assert len(episode.rewards) == info["l"]
        assert np.sum(episode.rewards) == pytest.approx(info["r"], abs=1e-5)
