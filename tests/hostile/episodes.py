"""Malicious HDF5 files: with parts in other files, and with filter plugins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.attack import Action, Attack
from tests.hostile.world import OFFLINE, World

ELSEWHERE = "stored in other files, which are not read"


def hdf5(change: Callable[[Any, Path], None], message: str) -> Attack:
    """Train on a dataset with modified episodes; ``change`` receives the first one and another file."""

    def prepare(world: World) -> Action:
        import h5py

        dataset = world.dataset(f"set{len(list(world.minari.glob('stranger/*')))}")
        with h5py.File(world.episodes(dataset), "r+") as file:
            change(file["episode_0"], world.episodes("stranger/benign-v0"))
        return lambda: world.run(f"{OFFLINE} --dataset {dataset} --run runs/{dataset[9:]}")

    return Attack(prepare, message)


def external_link(episode: Any, other: Path) -> None:
    import h5py

    del episode["rewards"]
    episode["rewards"] = h5py.ExternalLink(str(other), "/episode_0/rewards")


def external_episode(episode: Any, other: Path) -> None:
    import h5py

    file = episode.parent
    del file["episode_1"]
    file["episode_1"] = h5py.ExternalLink(str(other), "/episode_1")


def soft_link(episode: Any, other: Path) -> None:
    import h5py

    del episode["rewards"]
    episode["rewards"] = h5py.SoftLink("/episode_1/rewards")


def external_storage(episode: Any, other: Path) -> None:
    rows = len(episode["rewards"])
    del episode["rewards"]
    episode.create_dataset("rewards", (rows,), "f8", external=[(str(other), 0, 8 * rows)])


def virtual_storage(episode: Any, other: Path) -> None:
    import h5py

    rows = len(episode["rewards"])
    del episode["rewards"]
    layout = h5py.VirtualLayout((rows,), "f8")
    layout[:] = h5py.VirtualSource(str(other), "/episode_0/rewards", (rows,))
    episode.create_virtual_dataset("rewards", layout)


def plugin(episode: Any, other: Path) -> None:
    import h5py

    rows = len(episode["rewards"])
    del episode["rewards"]
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((rows,))
    created.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)
    space = h5py.h5s.create_simple((rows,))
    h5py.h5d.create(episode.id, b"rewards", h5py.h5t.NATIVE_DOUBLE, space, created)


def cycle(episode: Any, other: Path) -> None:
    del episode["observations"]
    group = episode.create_group("observations")
    group["observations"] = group


ATTACKS = {
    "HDF5 external link": hdf5(external_link, "rewards is a link (ExternalLink), which is not followed"),
    "HDF5 external episode": hdf5(external_episode, "episode_1 is a link (ExternalLink)"),
    "HDF5 soft link": hdf5(soft_link, "rewards is a link (SoftLink), which is not followed"),
    "HDF5 external storage": hdf5(external_storage, ELSEWHERE),
    "HDF5 virtual storage": hdf5(virtual_storage, ELSEWHERE),
    "HDF5 filter plugin": hdf5(plugin, "needs the filter plugin 32015, which is not loaded"),
    "HDF5 group in itself": hdf5(cycle, "the file is truncated or altered"),
}
"""Attacks by name."""
