import numpy as np

from rlxf.envs.batches import info_of, row_of, rows_of


def test_info_of_has_only_the_entries_of_one_environment():
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


def test_row_of_copies_from_arrays_dicts_of_arrays_and_arrays_of_dicts():
    batch = np.arange(6.0).reshape(2, 3)
    of_dicts = np.array([{"a": batch[0]}, {"a": batch[1]}], dtype=object)
    for row in (row_of(batch, 1), row_of({"a": batch}, 1)["a"], row_of(of_dicts, 1)["a"]):
        assert row.tolist() == [3, 4, 5]
        row += 1
    assert batch[1].tolist() == [3, 4, 5]


BATCH = {"pair": (np.arange(3), {"deep": np.arange(6).reshape(3, 2)}), "mission": ("left", "right", "stay")}


def test_row_of_nested_parts_and_text():
    row = row_of(BATCH, 1)
    assert (int(row["pair"][0]), row["pair"][1]["deep"].tolist(), row["mission"]) == (1, [2, 3], "right")
    last = np.array([None, row, None], dtype=object)  # Gymnasium's format of final observations
    copy = row_of(last, 1)
    copy["pair"][1]["deep"] += 1
    assert row["pair"][1]["deep"].tolist() == [2, 3]


def test_rows_of_nested_parts_and_text():
    rows = rows_of(BATCH, np.array([2, 0]))
    assert rows["pair"][0].tolist() == [2, 0]
    assert rows["pair"][1]["deep"].tolist() == [[4, 5], [0, 1]]
    assert rows["mission"] == ("stay", "left")
