"""What broke is recorded by nobody."""

from contextlib import closing

import numpy as np
import pytest

from rlxf.collection.recorder import Recorder
from tests.envs.workers.worlds import breaking


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:environment:RuntimeWarning")
def test_an_episode_that_broke_is_left_out_and_no_other(tmp_path):
    ended, recorded = [], []
    with closing(breaking(tmp_path, "step raises", "step dies", restarts=9)) as env:
        recorder = Recorder(env)
        recorder.reset()
        while env.restarts < 2 or env.absent() or len(ended) < 30:
            *_, infos = recorder.step(np.zeros(3, np.int64))
            ended += [(i, info["episode"]) for i, info in enumerate(infos) if "episode" in info]
            recorded += recorder.take()
    assert [i for i, _ in ended] == [i for i, _ in recorded]
    for (_, told), (_, episode) in zip(ended, recorded, strict=True):
        assert len(episode.rewards) == told["l"]
        assert np.sum(episode.rewards) == pytest.approx(told["r"], abs=1e-5)
