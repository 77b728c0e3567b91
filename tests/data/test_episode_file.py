"""Tests of errors for dataset files that are truncated, altered, or contradict their metadata."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import h5py
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from PIL import Image

from rlxf.data import DatasetError, conversion, load_trajectories
from rlxf.data.cache import cache_root
from rlxf.data.catalog import summarize
from rlxf.utils.memory_budget import memory_budget
from tests.datasets import ID, VECTOR, data_file, opened, random_episodes, record, record_random

pytestmark = pytest.mark.faults
ACTIONS = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 200.0], np.float32))


@pytest.fixture
def dataset(minari_root):
    return record_random((30, 1, 5), action_space=ACTIONS)


def check_refused(match):
    with pytest.raises(DatasetError, match=f"(?s){match}"):
        load_trajectories(ID)
    assert list(cache_root().glob("*")) == []


def check_damaged(match=""):
    check_refused(f"main_data.hdf5.*truncated or altered.*{match}.*again")


def check_damaged_in_subprocess():
    """Run `check_damaged` in a subprocess, since HDF5 may crash after it has read damaged bytes."""
    code = f"from rlxf.data import load_trajectories; load_trajectories({ID!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"(?s)DatasetError.*main_data.hdf5.*truncated or altered.*again", done.stderr)
    assert list(cache_root().glob("*")) == []


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("fraction", [0.3, 0.0, 0.999])
def test_a_truncated_file_is_reported(dataset, fraction):
    path = data_file(dataset)
    os.truncate(path, int(path.stat().st_size * fraction))
    check_damaged_in_subprocess()


def test_a_file_of_another_format_is_reported(dataset):
    data_file(dataset).write_text("not the data")
    check_damaged()


@pytest.mark.parametrize("name", ["rewards", "actions", "observations", "terminations", "truncations"])
def test_a_missing_array_is_reported(dataset, name):
    with opened(dataset) as file:
        del file[f"episode_1/{name}"]
    check_damaged()


@pytest.mark.parametrize("name", ["rewards", "actions", "observations", "terminations", "truncations"])
def test_an_array_of_another_length_is_reported(dataset, name):
    with opened(dataset) as file:
        file[f"episode_2/{name}"].resize(3, axis=0)
    check_damaged("episode|rows")


def test_a_missing_episode_is_reported(dataset):
    with opened(dataset) as file:
        del file["episode_1"]
    check_damaged()


def test_an_additional_episode_is_reported(dataset):
    with opened(dataset) as file:
        file.copy("episode_1", "episode_3")
    check_damaged("it has 4 episodes, but the metadata state 3")


def test_a_shortened_episode_is_detected_by_total_steps(dataset):
    with opened(dataset) as file:
        for name, array in file["episode_2"].items():
            array.resize(4 if name == "observations" else 3, axis=0)
    check_damaged("total_steps is 5")


def test_an_empty_episode_is_reported(dataset):
    with opened(dataset) as file:
        for name, array in file["episode_2"].items():
            array.resize(1 if name == "observations" else 0, axis=0)
        file["episode_2"].attrs["total_steps"] = 0
    check_damaged("it has no steps")


def test_rewards_that_differ_from_rewards_sum_are_reported(dataset):
    with opened(dataset) as file:
        file["episode_0"].attrs["rewards_sum"] = dataset[0].rewards.sum() + 1
    check_damaged("its rewards sum to")


def test_rewards_that_cancel_have_the_tolerance_of_their_sizes(minari_root):
    """Minari stores the sum in float32, whose rounding error does not shrink with the sum."""
    rewards = np.random.default_rng(0).normal(size=1000) * 1e5
    rewards = (rewards - rewards.mean()).astype(np.float32)
    dataset = record([replace(episode, rewards=rewards) for episode in random_episodes((1000,))])
    exact, rounded = rewards.sum(dtype=np.float64), np.cumsum(rewards)[-1]
    assert abs(rounded - exact) > 1e-3 * abs(exact) + 1e-3
    with opened(dataset) as file:
        file["episode_0"].attrs["rewards_sum"] = rounded
    assert load_trajectories(ID).steps == 1000
    with opened(dataset) as file:
        file["episode_0"].attrs["rewards_sum"] = exact + 0.01 * np.abs(rewards).sum()
    shutil.rmtree(cache_root())
    check_damaged("its rewards sum to")


def test_rewards_that_match_rewards_sum_are_accepted(dataset):
    with opened(dataset) as file:
        file["episode_0"].attrs["rewards_sum"] = np.float32(dataset[0].rewards.sum())
    assert load_trajectories(ID).steps == 36


def test_a_damaged_image_is_reported(minari_root):
    dataset = record_random((3,), observation_space=spaces.Box(0, 255, (32, 32, 3), np.uint8))
    with opened(dataset) as file:
        frames = file["episode_0/observations"]
        frames[1] = np.zeros(9, np.uint8) if frames.ndim == 1 else 0
    check_damaged()


IMAGES = spaces.Box(0, 255, (32, 32, 3), np.uint8)


def jpeg(padding=0):
    """Return a black image of the size of `IMAGES`, followed by bytes without meaning."""
    data = io.BytesIO()
    Image.new("RGB", (32, 32)).save(data, "JPEG")
    return np.frombuffer(data.getvalue() + bytes(padding), np.uint8)


def with_frames(frames):
    """Record images, replace them by an array of variable length, and return the dataset."""
    dataset = record_random((len(frames) - 1,), observation_space=IMAGES, jpeg_encoding=True)
    with opened(dataset) as file:
        del file["episode_0/observations"]
        array = file.create_dataset("episode_0/observations", (len(frames),), h5py.vlen_dtype(np.uint8))
        for row, frame in enumerate(frames):
            array[row] = frame
    return dataset


def test_images_of_variable_length_are_read(minari_root):
    with_frames([jpeg(row) for row in range(5)])
    assert (load_trajectories(ID).observations == 0).all()


def test_rows_that_share_bytes_have_a_memory_budget(minari_root):
    """Each row of variable length refers to its bytes in the file, and all can refer to the same bytes."""
    dataset = with_frames([jpeg(100_000)] + [jpeg()] * 40)
    with opened(dataset) as file:
        first = file["episode_0/observations"].id.get_offset()
    data = bytearray(data_file(dataset).read_bytes())
    data[first : first + 16 * 41] = data[first : first + 16] * 41
    data_file(dataset).write_bytes(data)
    assert load_trajectories(ID).steps == 40
    shutil.rmtree(cache_root())
    with memory_budget(1):
        check_refused("main_data.hdf5, episode 0: the file requires .* for encoded images")


def test_fill_values_of_images_have_a_memory_budget(minari_root):
    """Rows that were never written take no space in the file."""
    dataset = record_random((3,), observation_space=IMAGES, jpeg_encoding=True)
    with opened(dataset) as file:
        del file["episode_0/observations"]
        file.create_dataset("episode_0/observations", (4, 10**9), np.uint8, chunks=(1, 1000))
    check_refused("main_data.hdf5, episode 0: the file requires .* for encoded images")


def test_images_with_a_huge_size_in_their_header_are_reported(minari_root):
    frame = jpeg().copy()
    start = frame.tobytes().index(b"\xff\xc0")
    frame[start + 5 : start + 9] = 0xFF
    with_frames([frame, jpeg()])
    check_damaged("pixels")


@pytest.mark.parametrize("name", ["total_steps", "rewards_sum"])
@pytest.mark.parametrize("value", ["30", np.zeros(2000), np.array([30])], ids=["text", "array", "list"])
def test_attributes_that_are_no_numbers_are_reported(dataset, name, value):
    with opened(dataset) as file:
        file["episode_0"].attrs[name] = value
    check_damaged(f"{name} is not a single number")


def test_a_changed_byte_in_compressed_data_is_reported(dataset):
    values = np.arange(30)
    with opened(dataset) as file:
        del file["episode_0/rewards"]
        stored = file.create_dataset("episode_0/rewards", data=values, chunks=True, compression="gzip")
        chunk = stored.id.get_chunk_info(0)
    with open(data_file(dataset), "r+b") as handle:
        handle.seek(chunk.byte_offset + chunk.size // 2)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 0xFF]))
    check_damaged_in_subprocess()


def replaced(dataset, name, values, **options):
    with opened(dataset) as file:
        del file[name]
        file.create_dataset(name, data=values, **options)


@pytest.mark.parametrize("value", [-1.01, 1.01, 1e30])
def test_an_action_outside_of_its_box_is_reported_with_episode_and_step(dataset, value):
    with opened(dataset) as file:
        file["episode_2/actions"][3, 0] = value
    check_refused("episode 2: the action of step 3 is .* outside of Box")


@pytest.mark.parametrize(("column", "value"), [(0, 1.00005), (0, -1.00005), (1, 200.01), (1, -0.00005)])
def test_rounding_errors_are_accepted(dataset, column, value):
    with opened(dataset) as file:
        file["episode_2/actions"][3, column] = value
    assert load_trajectories(ID).actions[34, column] == np.float32(value)


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        (
            "actions",
            np.zeros((5, 3), np.float32),
            r"have rows of shape \(3,\), but the metadata state \(2,\)",
        ),
        (
            "actions",
            np.zeros(5, np.float32),
            r"actions have rows of shape \(\), but the metadata state \(2,\)",
        ),
        ("actions", np.zeros((5, 2), complex), "actions are of complex128, but the metadata state float32"),
        ("actions", np.full((5, 2), b"1"), r"actions are of \|S1, but the metadata state float32"),
        ("observations", np.zeros((6, 1), np.float32), r"observations have rows of shape \(1,\)"),
        ("observations", np.zeros((6, 3, 1), np.float32), r"observations have rows of shape \(3, 1\)"),
        (
            "rewards",
            np.zeros((5, 2)),
            r"rewards are of float64 with rows of shape \(2,\), not",
        ),
        ("rewards", np.full(5, b"1"), "rewards are of"),
        ("terminations", np.full(5, b"1"), "terminations are of"),
    ],
)
def test_shapes_and_dtypes_that_differ_from_the_metadata_are_reported(dataset, name, values, match):
    replaced(dataset, f"episode_2/{name}", values)
    check_refused(f"main_data.hdf5, episode 2: .*{match}")


def test_float_actions_of_discrete_spaces_are_refused_with_the_remedy(minari_root):
    episode = EpisodeBuffer(
        observations=np.zeros((4, 3), np.float32),
        actions=np.zeros(3, np.float32),
        rewards=[1.0] * 3,
        terminations=[False, False, True],
        truncations=[False] * 3,
    )
    spaces_of_data = {"observation_space": VECTOR, "action_space": spaces.Discrete(2)}
    minari.create_dataset_from_buffers(ID, [episode], **spaces_of_data)
    with pytest.raises(DatasetError) as refused:
        load_trajectories(ID)
    message = str(refused.value)
    assert "episode 0: actions are of float32, but the metadata state int64 (Discrete(2))" in message
    assert (
        f"convert its arrays or correct its spaces, and create it again after minari delete {ID}" in message
    )
    assert "truncated" not in message


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_castable_dtypes_are_accepted(dataset, dtype):
    replaced(dataset, "episode_2/actions", np.ones((5, 2), dtype))
    assert (load_trajectories(ID).actions[31:] == 1).all()


@pytest.mark.parametrize("name", ["terminations", "truncations"])
def test_an_end_before_the_last_step_is_reported(dataset, name):
    with opened(dataset) as file:
        file[f"episode_0/{name}"][7] = True
    check_refused(
        f"episode 0: its {name} are True at step 7 of 30, before the last, but an episode ends at its first "
        f"flag. If you created {ID}, split the episode after each flag, and create it again after minari "
        f"delete {ID}; otherwise the file is altered: download it again"
    )


@pytest.mark.parametrize(
    "space", [VECTOR, spaces.Dict(a=VECTOR, b=spaces.Tuple([VECTOR]))], ids=["Box", "Dict"]
)
def test_episodes_without_the_last_observation_are_refused_with_the_remedy(minari_root, space):
    """Many logs have as many observations as actions; Minari writes them without an error."""
    dataset = record_random((4, 3), observation_space=space)
    with opened(dataset) as file:
        node = file["episode_1/observations"]
        arrays = [node] if isinstance(node, h5py.Dataset) else [node["a"], node["b/_index_0"]]
        for array in arrays:
            array.resize(3, axis=0)
    check_refused(
        "main_data.hdf5, episode 1: it has 3 steps and as many observations, but an episode of T steps has T "
        rf"\+ 1 observations. If you created {ID}, append .*, or the last observation again"
    )


def test_too_many_observations_are_damage(dataset):
    with opened(dataset) as file:
        file["episode_1/observations"].resize(3, axis=0)
    check_damaged("it has 1 rewards, but 3 rows of observations")


def test_an_external_link_is_not_followed(dataset, tmp_path):
    with h5py.File(tmp_path / "other.hdf5", "w") as other:
        other["secret"] = np.zeros((5, 2), np.float32)
    with opened(dataset) as file:
        del file["episode_2/actions"]
        file["episode_2/actions"] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), "secret")
    check_refused("episode 2: .*actions is a link .ExternalLink., which is not followed")


def test_an_episode_that_is_an_external_link_is_not_followed(dataset, tmp_path):
    with h5py.File(tmp_path / "other.hdf5", "w") as other, opened(dataset) as file:
        file.copy("episode_2", other)
        del file["episode_2"]
        file["episode_2"] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), "episode_2")
    check_refused("episode_2 is a link .ExternalLink., which is not followed")


def test_external_storage_is_not_read(dataset, tmp_path):
    (tmp_path / "bytes").write_bytes(bytes(40))
    with opened(dataset) as file:
        del file["episode_2/actions"]
        external = [(str(tmp_path / "bytes"), 0, 40)]
        file.create_dataset("episode_2/actions", (5, 2), np.float32, external=external)
    check_refused("episode 2: .*actions is stored in other files")


def enlarged(dataset, steps):
    """Replace an episode by a highly compressed one of ``steps`` steps."""
    shapes = {"actions": (2,), "observations": (30,), "rewards": (), "terminations": (), "truncations": ()}
    with opened(dataset) as file:
        group = file["episode_0"]
        for name, shape in shapes.items():
            kind = group[name].dtype
            del group[name]
            rows = (steps + (name == "observations"), *shape)
            group.create_dataset(name, rows, kind, chunks=(10**5, *shape), compression="gzip")
        group.attrs["total_steps"] = steps
    dataset.storage.update_metadata({"total_steps": steps})


def test_a_decompression_bomb_is_refused_before_arrays_are_written(minari_root):
    wide = spaces.Box(-np.inf, np.inf, (30,), np.float32)
    dataset = record_random((30,), observation_space=wide, action_space=ACTIONS)
    enlarged(dataset, 10**6)
    with memory_budget(2 * 10**7):
        check_refused("requires .* MB of memory .*for the rewards of its longest episode.*RLXF_MEMORY_BUDGET")
    with memory_budget(40 * 10**6):
        check_refused("requires 136.0 MB of memory .*for its converted arrays")


def test_more_actions_than_a_network_can_have_are_refused(minari_root):
    """A Discrete space costs nothing in the file, but each action is a row of weights of an agent."""
    record_random((3,), action_space=spaces.Discrete(10**12))
    check_refused("requires 512,000.0 GB of memory .*for a layer for 1,000,000,000,000 actions")


def test_wide_actions_are_refused_before_their_sizes_are_listed(minari_root, monkeypatch):
    """The sizes of 10^10 binary actions alone would take 80 GB."""
    record_random((3,), action_space=spaces.MultiBinary(5))
    monkeypatch.setattr(conversion, "discrete_sizes", lambda space: pytest.fail("sizes of all actions"))
    monkeypatch.setattr(conversion, "_row_bytes", lambda encoder: 10**10)
    check_refused("requires 160.0 GB of memory .*for one step")


def test_a_chunk_larger_than_the_budget_is_not_read(dataset):
    with opened(dataset) as file:
        del file["episode_2/actions"]
        chunks = (10**6, 2)
        file.create_dataset(
            "episode_2/actions", (5, 2), np.float32, chunks=chunks, maxshape=(None, 2), compression="gzip"
        )
    with memory_budget(10**6):
        check_refused("episode 2: the file requires 8.0 MB of memory .*for a chunk of an array")


def test_large_metadata_is_not_parsed(dataset):
    path = data_file(dataset).with_name("metadata.json")
    path.write_text(path.read_text() + " " * (5 * 2**20))
    check_refused("metadata.json has 5,.* bytes, the maximum is 4,194,304")


def test_one_hot_encoding_does_not_build_an_identity_matrix(minari_root):
    """An identity matrix for 20,000 values would take 1.6 GB."""
    record_random((3,), observation_space=spaces.Discrete(20_000))
    assert load_trajectories(ID).observations.sum() == 3


def test_hard_links_to_common_groups_are_refused(minari_root):
    """40 groups, each with two links to the next one, have 2^40 paths."""
    inner, space = VECTOR, None
    for _ in range(3):
        space = spaces.Dict({"a": space or inner, "b": space or inner})
    dataset = record_random((2,), observation_space=space)
    with opened(dataset) as file:
        observations = file["episode_0/observations"]
        names = ("a", "b")
        for name in names:
            del observations[name]
        groups = [observations, *(file.create_group(f"episode_0/deep/{level}") for level in range(40))]
        for above, below in pairwise(groups):
            for name in names:
                above[name] = below
        groups[-1]["a"] = np.zeros((3, 3), np.float32)
    with pytest.raises(DatasetError, match="has several hard links"):
        summarize(ID)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("total_episodes", 2_000_000_000, r"it has 3 episodes, but the metadata state 2000000000"),
        ("total_episodes", 3.0, r"but the metadata state 3\.0"),
        ("total_episodes", "3" * 1000, "but the metadata state 33333333333333333333\\)"),
        (
            "observation_space",
            '{"type": "Box", "dtype": "S300000000", "shape": [2]}',
            "the dtype 'S300000000'",
        ),
    ],
)
def test_metadata_that_require_much_memory_are_refused(dataset, name, value, message):
    path = data_file(dataset).with_name("metadata.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    for read in (summarize, load_trajectories):
        with pytest.raises(DatasetError, match=message):
            read(ID)


def test_summaries_have_a_memory_budget(dataset):
    """Chunks that were never written take no space in the file."""
    with opened(dataset) as file:
        steps = 60_000_000
        for name in ("actions", "rewards", "terminations", "truncations"):
            file[f"episode_0/{name}"].resize(steps, axis=0)
        file["episode_0/observations"].resize(steps + 1, axis=0)
        file["episode_0"].attrs["total_steps"] = steps
    path = data_file(dataset).with_name("metadata.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_steps": steps + 6}))
    with pytest.raises(DatasetError, match="the rewards of its longest episode"):
        summarize(ID)


def test_spaces_may_have_a_part_named_dtype(minari_root):
    space = spaces.Dict({"dtype": VECTOR, "other": spaces.Tuple([spaces.Box(0, 1, (2,), np.dtype(">f4"))])})
    record_random((3, 2), observation_space=space)
    assert summarize(ID).lengths.tolist() == [3, 2]


def test_a_damaged_file_without_episodes_is_reported(dataset):
    data_file(dataset).write_text("not the data")
    path = data_file(dataset).with_name("metadata.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_episodes": 0}))
    with pytest.raises(DatasetError):
        load_trajectories(ID)
