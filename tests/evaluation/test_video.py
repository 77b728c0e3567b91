"""Films of episodes: what is on them, where they go, and what cannot be filmed."""

from io import BytesIO

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Video, configure
from stable_baselines3.common.vec_env import VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf.evaluation import film as filming
from rlxf.evaluation.film import SIDE, film
from rlxf.evaluation.gif import attach_gifs, encode_gif
from rlxf.evaluation.video import VideoCallback
from tests.evaluation.tasks import Countdown, Counter, Idle, vec

SIZE = (6, 8)


class Drawn(Countdown):
    """Shows the number of steps as a shade of grey."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 - as in Gymnasium

    def __init__(self, length: int = 3, render_mode: str | None = "rgb_array", size: tuple[int, int] = SIZE):
        super().__init__(length)
        self.render_mode, self.size, self.resets = render_mode, size, 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def render(self):
        return np.full((*self.size, 3), 10 * self.time, np.uint8)


class Seen(Idle):
    """Remembers what it was shown."""

    def __init__(self, normalizer=None):
        self.observations, self.normalizer = [], normalizer

    def get_vec_normalize_env(self):
        return self.normalizer

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        self.observations.append(float(observation[0, 0]))
        return super().predict(observation)


def shades(pictures) -> list[int]:
    return [int(picture.mean()) // 10 for picture in pictures]


# What is on a film


def test_a_film_shows_every_state_from_the_first_to_the_last():
    pictures = film(Idle(), Drawn(4), seed=0, deterministic=True)
    assert pictures.shape == (5, *SIZE, 3)
    assert shades(pictures) == [0, 1, 2, 3, 4]


def test_the_agent_remembers_during_a_film():
    class CountsAloud(Drawn):
        def look(self):
            return np.zeros(1, np.float32)

        def step(self, action):
            assert action == self.time
            return super().step(action)

    assert len(film(Counter(), CountsAloud(4), seed=0, deterministic=True)) == 5


def test_a_film_of_an_endless_episode_ends(monkeypatch):
    monkeypatch.setattr(filming, "LONGEST", 7)
    assert len(film(Idle(), Drawn(10**9), seed=0, deterministic=True)) == 8


def test_large_pictures_are_reduced():
    height, width = film(Idle(), Drawn(1, size=(SIDE, 2 * SIDE + 1)), 0, True).shape[1:3]
    assert (height, width) == (-(-SIDE // 3), -(-(2 * SIDE + 1) // 3))
    assert max(height, width) <= SIDE


def test_observations_are_normalised_as_in_training():
    trained_in = VecNormalize(vec(Countdown(9)))
    trained_in.obs_rms.mean[:], trained_in.obs_rms.var[:] = 1.0, 4.0
    agent = Seen(trained_in)
    film(agent, Drawn(3), seed=0, deterministic=True)
    np.testing.assert_allclose(agent.observations, [-0.5, 0.0, 0.5], atol=1e-6)
    assert trained_in.obs_rms.mean == 1.0


def test_a_seed_gives_the_same_film():
    env = gymnasium.make("rlxf/TMaze-v0", corridor_length=3, render_mode="rgb_array")
    films = [film(Idle(), env, seed, deterministic=True) for seed in (0, 0, *range(1, 9))]
    assert np.array_equal(films[0], films[1])
    assert not all(np.array_equal(films[0], other) for other in films[2:])


def test_a_gif_holds_all_pictures_and_stands_still_at_the_last():
    pictures = film(Idle(), Drawn(4), seed=0, deterministic=True)
    gif = Image.open(BytesIO(encode_gif(pictures, fps=5)))
    found, durations = [], []
    for number in range(gif.n_frames):
        gif.seek(number)
        found.append(np.asarray(gif.convert("RGB")))
        durations.append(gif.info["duration"])
    np.testing.assert_array_equal(found, pictures)
    assert durations == [200, 200, 200, 200, 1000]
    assert gif.info["loop"] == 0


# Where it goes


def learner(env) -> PPO:
    return PPO("MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu")


def films(folder) -> list:
    return EventAccumulator(str(folder), size_guidance={"images": 0}).Reload().Images("eval/video")


def test_films_are_images_of_tensorboard(tmp_path):
    agent = learner(vec(Countdown(3)))
    agent.set_logger(configure(str(tmp_path), ["tensorboard", "csv", "json", "log"]))
    agent.learn(24, VideoCallback(Drawn(3), every_steps=10))
    agent.logger.close()
    written = films(tmp_path)
    assert [one.step for one in written] == [16, 24]  # filmed at 10 and 20, written with the rollouts
    for one in written:
        gif = Image.open(BytesIO(one.encoded_image_string))
        assert (gif.format, gif.n_frames) == ("GIF", 4)
        assert (one.height, one.width) == SIZE
    assert "eval/video" not in (tmp_path / "progress.csv").read_text()


def test_a_second_training_writes_each_film_once(tmp_path):
    agent, callback = learner(vec(Countdown(3))), VideoCallback(Drawn(3), every_steps=8)
    agent.set_logger(configure(str(tmp_path), ["tensorboard"]))
    agent.learn(8, callback)
    agent.learn(8, callback, reset_num_timesteps=False)
    assert [one.step for one in films(tmp_path)] == [8, 16]


def test_without_tensorboard_nothing_is_played(tmp_path):
    agent, env = learner(vec(Countdown(3))), Drawn(3)
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    callback = VideoCallback(env, every_steps=8)
    before = env.resets
    agent.learn(8, callback)
    assert env.resets == before


def test_a_video_of_the_users_own_is_written_too(tmp_path):
    logger = configure(str(tmp_path), ["tensorboard"])
    assert attach_gifs(logger)
    frames = torch.zeros(1, 2, 3, 4, 5, dtype=torch.uint8)
    logger.record("mine", Video(frames, fps=10), exclude="tensorboard")
    logger.dump(7)
    logger.close()
    (image,) = EventAccumulator(str(tmp_path)).Reload().Images("mine")
    assert (image.step, image.height, image.width) == (7, 4, 5)


# What cannot be filmed


def test_an_environment_made_without_pictures_is_told_how_to():
    with pytest.raises(ValueError, match="make it with render_mode='rgb_array'"):
        VideoCallback(Drawn(render_mode=None))
    with pytest.raises(
        ValueError, match=r"render_mode=None and offers \['ansi', 'rgb_array'\]: make it with"
    ):
        VideoCallback(gymnasium.make("rlxf/TMaze-v0"))


def test_an_environment_without_pictures_cannot_be_filmed():
    with pytest.raises(ValueError, match=r"offers \[\]: it cannot be filmed"):
        VideoCallback(Countdown())


def test_what_keeps_it_from_drawing_is_said():
    class Broken(Drawn):
        def render(self):
            raise RuntimeError("no display")

    with pytest.raises(ValueError, match="does not draw: RuntimeError\\('no display'\\)"):
        VideoCallback(Broken())


def test_several_environments_are_none():
    with pytest.raises(TypeError, match=r"one gymnasium.Env, made with render_mode='rgb_array'; got"):
        VideoCallback(vec(Drawn()))


def test_less_than_one_is_refused():
    with pytest.raises(ValueError, match="every_steps must be at least 1, got 0"):
        VideoCallback(Drawn(), every_steps=0)
