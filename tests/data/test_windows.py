"""Tests of windows of trajectories."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlxf.data import EpisodeWindows, Windows

CONTEXT = 5


def slow_window(data, start, length):
    """Reference implementation of a window as in the paper: slice the episode and pad on the left."""
    episode = next(e for e in range(data.episodes) if data.offsets[e] <= start < data.offsets[e + 1])
    end = min(start + length, data.offsets[episode + 1])
    missing = length - (end - start)

    def padded(array):
        return np.concatenate([np.zeros((missing, *array.shape[1:]), array.dtype), array[start:end]])

    return {
        "observations": padded(data.observations),
        "actions": padded(data.actions),
        "return_to_go": padded(data.return_to_go),
        "time_steps": np.concatenate([np.zeros(missing, int), np.arange(start, end) - data.offsets[episode]]),
        "mask": np.arange(length) >= missing,
    }


@pytest.mark.parametrize("length", [1, 2, CONTEXT, 12, 30])
def test_windows_equal_the_reference_implementation(data, length):
    batch = Windows(data, length).starting_at(np.arange(data.steps))
    for start in range(data.steps):
        for name, expected in slow_window(data, start, length).items():
            np.testing.assert_array_equal(
                getattr(batch, name)[start], expected, err_msg=f"{name} from {start}"
            )


@pytest.mark.parametrize(("length", "burn_in"), [(1, 1), (3, 2), (CONTEXT, 4), (4, 30), (30, 5)])
def test_burn_in_adds_the_preceding_steps(data, length, burn_in):
    batch = Windows(data, length, burn_in).starting_at(np.arange(data.steps))
    for start in range(data.steps):
        episode = np.searchsorted(data.offsets, start, side="right") - 1
        first = max(start - burn_in, data.offsets[episode])
        end = min(start + length, data.offsets[episode + 1])
        rows = np.arange(first, end)
        missing = burn_in + length - len(rows)
        assert batch.mask[start].tolist() == [False] * missing + [True] * len(rows)
        assert batch.actions[start].tolist() == [0] * missing + data.actions[rows].tolist()
        assert batch.time_steps[start, missing:].tolist() == (rows - data.offsets[episode]).tolist()


@pytest.mark.parametrize("length", [1, 3, CONTEXT, 30])
@pytest.mark.parametrize("kind", [Windows, EpisodeWindows])
def test_only_windows_with_a_terminal_step_are_terminated(data, kind, length):
    """Rows of a batch that are shorter than others have padding on the left, or on the right."""
    terminal = np.array([True, False, True, True])
    batch = kind(replace(data, terminated=terminal), length).starting_at(np.arange(data.steps))
    newest = (batch.actions * batch.mask).amax(dim=1) - 1  # the actions count the steps from 1
    ends = np.isin(newest, data.offsets[1:][terminal] - 1)
    assert batch.terminated.tolist() == ends.tolist()


def test_first_steps_are_drawn_uniformly(data):
    batch = Windows(data, CONTEXT).sample(24_000, torch.Generator().manual_seed(0))
    first = torch.argmax(batch.mask.int(), dim=1)
    starts = batch.actions.gather(1, first[:, None])[:, 0] - 1
    counts = torch.bincount(starts, minlength=data.steps)
    # the expected count of each of 24 steps is 1000, with a standard deviation of 31
    assert counts.min() > 850
    assert counts.max() < 1150


def test_equal_generators_give_equal_windows(data):
    windows = Windows(data, CONTEXT)
    one, same, other = (windows.sample(50, torch.Generator().manual_seed(seed)).actions for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("length", "batch_size"), [(1, 7), (CONTEXT, 2), (CONTEXT, 100), (30, 3)])
def test_cover_contains_each_step_once_in_order(data, length, batch_size):
    batches = list(Windows(data, length).iterate_once(batch_size))
    covered = torch.cat([batch.actions[batch.mask] for batch in batches])
    assert covered.tolist() == list(range(1, data.steps + 1))
    assert {len(batch.mask) for batch in batches[:-1]} <= {batch_size}


def test_batches_are_copies(data):
    data.observations.flags.writeable = data.actions.flags.writeable = False
    batch = Windows(data, CONTEXT).starting_at([0])
    batch.observations.fill_(-1)
    assert data.observations.min() > 0


def test_images_stay_uint8(data):
    images = np.full((data.steps, 1, 4, 4), 7, np.uint8)
    batch = Windows(replace(data, observations=images), CONTEXT).sample(3)
    assert batch.observations.dtype == torch.uint8
    assert batch.observations.shape == (3, CONTEXT, 1, 4, 4)


def test_to_moves_all_tensors(data):
    batch = Windows(data, CONTEXT).sample(2).to("meta")
    assert {getattr(batch, name).device.type for name in ("observations", "actions", "mask")} == {"meta"}


@pytest.mark.parametrize("length", [0, -3])
def test_a_length_less_than_1_is_refused(data, length):
    with pytest.raises(ValueError, match=f"length must be at least 1, got {length}"):
        Windows(data, length)


@pytest.mark.parametrize("start", [-1, 24])
def test_a_start_out_of_range_is_refused(data, start):
    with pytest.raises(IndexError, match=rf"steps from 0 to 23, got .*{start}"):
        Windows(data, CONTEXT).starting_at([3, start])


@pytest.mark.parametrize(("length", "burn_in"), [(1, 0), (3, 2), (CONTEXT, 30), (12, 0), (30, 0), (30, 5)])
def test_trimmed_windows_lack_only_columns_of_padding(data, length, burn_in):
    windows = Windows(data, length, burn_in)
    trimmed = windows.trimmed()
    full, batch = (each.starting_at(np.arange(data.steps)) for each in (windows, trimmed))
    columns = min(length + burn_in, 12)
    assert batch.mask.shape == (data.steps, columns)
    assert not full.mask[:, :-columns].any()
    assert batch.mask[:, 0].any()
    for name in ("observations", "actions", "rewards", "return_to_go", "time_steps", "mask"):
        assert torch.equal(getattr(batch, name), getattr(full, name)[:, -columns:]), name
    assert torch.equal(batch.terminated, full.terminated)


def test_trimmed_windows_of_some_episodes_have_the_columns_of_all(data):
    """The shape of a batch depends neither on held-out episodes nor on the drawn windows."""
    windows = Windows(data, 30)
    parts = [part.trimmed() for part in windows.split(0.5, seed=1)] + [*windows.trimmed().split(0.5, seed=1)]
    assert {batch.mask.shape[1] for part in parts for batch in part.iterate_once(3)} == {12}
    one, same = (each.draw(50, torch.Generator().manual_seed(3)) for each in (windows, windows.trimmed()))
    assert torch.equal(one, same)
