import numpy as np

from rlxf.envs.infos import info_of, row_of


def test_each_environment_gets_what_it_gave():
    mask, other = np.array([True, False]), np.array([True, True])
    infos = {
        "both": np.array([3, 4]),
        "_both": other,
        "one": np.array(["x", None], dtype=object),
        "_one": mask,
        "inner": {"deep": np.array([0.5, 0.0]), "_deep": mask},
        "_inner": mask,
        "of_the_batch": "no mask",
    }
    assert info_of(infos, 0) == {"both": 3, "one": "x", "inner": {"deep": 0.5}}
    assert info_of(infos, 1) == {"both": 4}


def test_a_row_is_the_same_from_arrays_dicts_of_arrays_and_arrays_of_dicts():
    batch = np.arange(6.0).reshape(2, 3)
    of_dicts = np.array([{"a": batch[0]}, {"a": batch[1]}], dtype=object)
    for row in (row_of(batch, 1), row_of({"a": batch}, 1)["a"], row_of(of_dicts, 1)["a"]):
        assert row.tolist() == [3, 4, 5]
        row += 1
    assert batch[1].tolist() == [3, 4, 5]
