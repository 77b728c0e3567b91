"""Tests of checkpoint files: round trips, atomic writes, and rejection of damaged or crafted files."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
import zipfile
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.training import CheckpointError, read_archive, write_archive
from rlxf.training import archive as archive_module
from tests.sources import ROOT
from tests.training.samples import (
    DOCUMENTS,
    TENSORS,
    crafted,
    files_in,
    holds_sample,
    manifest_of,
    reseal,
    same_tensors,
    sealed_zip,
    write_sample,
)

JSON = b"{}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.zip"


def read_error(path, data: bytes, **limits) -> str:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as failure:
        read_archive(path, **limits)
    assert str(path) in str(failure.value)
    return str(failure.value)


# Round trips


def test_round_trip_of_documents_and_tensors(path):
    write_sample(path)
    assert holds_sample(path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor(True),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int64),
        torch.tensor([1.0, float("nan"), float("inf"), -0.0], dtype=torch.bfloat16),
        torch.tensor([2**63 - 1, -(2**63)]),
        torch.tensor([1e-310, 1.0 / 3], dtype=torch.float64),
        torch.arange(4, dtype=torch.uint8),
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.zeros(1).expand(5, 2),
        torch.ones(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, dtype=torch.float16)),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_round_trip_of_a_tensor_is_bit_exact(path, tensor):
    write_archive(path, {}, {"group": {"tensor": tensor}})
    back = read_archive(path).tensors["group"]["tensor"]
    plain = tensor.detach().contiguous()
    assert (back.dtype, back.shape) == (plain.dtype, plain.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))
    assert back.is_contiguous()


def test_tensors_with_shared_storage_are_read_with_own_storage(path):
    base = torch.arange(6.0)
    group = {"whole": base, "same": base, "half": base[3:], "rows": base.reshape(2, 3)}
    write_archive(path, {}, {"group": group})
    back = read_archive(path).tensors["group"]
    assert same_tensors(back, group)
    back["whole"].zero_()
    assert torch.equal(back["half"], torch.tensor([3.0, 4.0, 5.0]))


def test_loaded_tensors_can_be_trained(path):
    write_sample(path)
    weight = read_archive(path).tensors["policy"]["weight"].requires_grad_()
    weight.square().sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    assert torch.allclose(weight, 0.8 * TENSORS["policy"]["weight"])


def test_document_and_group_may_have_the_same_name(path):
    write_archive(path, {"policy": [1]}, {"policy": {"a": torch.ones(1)}})
    archive = read_archive(path)
    assert archive.documents == {"policy": [1]}
    assert archive.tensors["policy"].keys() == {"a"}


def test_round_trip_of_empty_archive_and_group(path):
    write_archive(path, {}, {"policy": {}})
    archive = read_archive(path)
    assert (archive.documents, archive.tensors) == ({}, {"policy": {}})


def test_equal_content_gives_equal_bytes(path):
    assert write_sample(path) == write_sample(path)


def test_file_is_a_standard_zip_with_a_manifest(path):
    write_sample(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        manifest = json.loads(archive.read("manifest.json"))
        assert all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
        members = {name: archive.read(name) for name in archive.namelist() if name != "manifest.json"}
    assert members.keys() == {"config.json", "spaces.json", "policy.safetensors", "optimizer.safetensors"}
    assert manifest == json.loads(manifest_of(members))


def test_zip64_files_are_read(path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # write the zip64 record for a small file
    data = write_sample(path)
    assert b"PK\x06\x06" in data
    assert holds_sample(path)
    moved = bytearray(data)
    moved[data.rindex(b"PK\x06\x07") + 8] ^= 1
    assert "zip64" in read_error(path, reseal(bytes(moved)))


def test_maximum_number_of_members_is_read(path):
    documents = {f"{i:0100d}": i for i in range(999)}
    write_archive(path, documents, {})
    assert read_archive(path).documents == documents


# Refusals before writing


@pytest.mark.parametrize(
    ("documents", "tensors", "error", "message"),
    [
        ({"config": {"lr": float("nan")}}, {}, ValueError, "config"),
        ({"config": {"device": torch.device("cpu")}}, {}, TypeError, "config"),
        ({"../config": {}}, {}, ValueError, r"\.\./config"),
        ({"manifest": {}}, {}, ValueError, "manifest"),
        ({}, {"a/b": {}}, ValueError, "a/b"),
        ({}, {"policy": {"weight": [1.0]}}, TypeError, "weight.*list"),
        ({}, {"policy": {3: torch.ones(1)}}, TypeError, "3.*Tensor"),
        ({}, {"policy": {"__metadata__": torch.ones(1)}}, ValueError, "__metadata__"),
        ({}, {"policy": {"sparse": torch.eye(2).to_sparse()}}, TypeError, "sparse"),
        ({}, {"policy": {"z": torch.ones(1, dtype=torch.complex64)}}, TypeError, "complex64"),
        ({f"d{i}": i for i in range(1000)}, {}, ValueError, "at most 999 members, got 1000"),
    ],
)
def test_unsupported_content_is_rejected_before_writing(path, documents, tensors, error, message):
    path.write_bytes(b"old")
    with pytest.raises(error, match=message):
        write_archive(path, documents, tensors)
    assert path.read_bytes() == b"old"
    assert files_in(path.parent) == {path.name}


# Faults while writing


class FailingFile:
    """File on a disk that is full after ``room`` bytes."""

    def __init__(self, handle, room: int):
        self.handle, self.room = handle, room

    def write(self, data) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.handle.write(data)

    def __getattr__(self, name):
        return getattr(self.handle, name)


@pytest.mark.faults
@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_full_disk_leaves_the_old_file_unchanged(tmp_path_factory, share):
    path = tmp_path_factory.mktemp("full") / "checkpoint.zip"
    room = int(share * len(write_sample(path)))
    original = archive_module.atomic_write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            archive_module,
            "atomic_write",
            lambda to, write: original(to, lambda handle: write(FailingFile(handle, room))),
        )
        with pytest.raises(OSError, match=r"checkpoint\.zip.*No space left") as failure:
            write_archive(path, {"other": 1}, {"big": {"x": torch.zeros(1000)}})
    assert failure.value.errno == errno.ENOSPC
    assert holds_sample(path)
    assert files_in(path.parent) == {path.name}


@pytest.mark.faults
def test_file_size_limit_leaves_the_old_file_unchanged(path):
    size = len(write_sample(path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in range(0, size, 97):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=r"checkpoint\.zip"):
                write_archive(path, {"other": 1}, TENSORS | {"big": {"x": torch.zeros(1000)}})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert files_in(path.parent) == {path.name}
    assert holds_sample(path)


# Damage


@pytest.mark.faults
def test_flip_of_any_byte_is_detected(path):
    data = write_sample(path)
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        assert read_error(path, bytes(altered)), f"byte {position}"


@pytest.mark.faults
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 99])
def test_compressed_members_are_rejected(path, method):
    data = write_sample(path)
    for member in re.finditer(b"PK\x01\x02", data):  # entries of the directory
        altered = bytearray(data)
        altered[member.start() + 10 : member.start() + 12] = method.to_bytes(2, "little")
        assert "is compressed" in read_error(path, bytes(altered))


@pytest.mark.faults
def test_truncation_is_detected(path):
    data = write_sample(path)
    for length in range(0, len(data), 7):
        read_error(path, data[:length])
    assert "truncated" in read_error(path, data[:-1])


@pytest.mark.faults
@settings(max_examples=200, deadline=None)
@given(changes=st.data())
def test_mutations_with_a_valid_seal_are_detected(tmp_path_factory, changes):
    """An attacker can compute the seal; the file is then rejected or equals the content of the manifest."""
    path = tmp_path_factory.mktemp("mutated") / "checkpoint.zip"
    data = bytearray(write_sample(path))
    for _ in range(changes.draw(st.integers(1, 4))):
        start = changes.draw(st.integers(0, len(data) - 64))
        length = changes.draw(st.integers(0, 12))
        data[start : start + length] = changes.draw(st.binary(max_size=12))
    path.write_bytes(reseal(bytes(data)))
    with suppress(CheckpointError):
        assert holds_sample(path)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["config.json", "policy.safetensors", "manifest.json"])
def test_altered_member_is_reported(path, name):
    data = bytearray(write_sample(path))
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(name)
        position = member.header_offset + 30 + len(name) + member.file_size // 2
    data[position] ^= 4
    assert name in read_error(path, bytes(data))


@pytest.mark.parametrize(("member", "change"), [("config.json", b'{"a":1}'), ("config.json", b"[]")])
def test_replaced_member_is_detected(path, member, change):
    members = [(member, change), ("manifest.json", manifest_of({member: JSON}))]
    assert "config.json" in read_error(path, sealed_zip(members))


def test_missing_and_extra_members_are_reported(path):
    manifest = ("manifest.json", manifest_of({"config.json": JSON}))
    assert "'config.json' is missing" in read_error(path, sealed_zip([manifest]))
    extra = [("config.json", JSON), ("more.json", JSON), manifest]
    assert "'more.json' is not listed" in read_error(path, sealed_zip(extra))


def test_duplicate_member_is_reported(path):
    members = [("config.json", b"[]"), ("config.json", JSON)]
    with pytest.warns(UserWarning, match="Duplicate"):
        data = sealed_zip([*members, ("manifest.json", manifest_of({"config.json": JSON}))])
    assert "'config.json' is duplicated" in read_error(path, data)


# Foreign files


def test_non_zip_file_is_rejected(path):
    assert "not a zip" in read_error(path, b"")
    assert "not a zip" in read_error(path, b"\x80\x04K\x01." * 100)


def test_file_of_stable_baselines3_is_reported_and_not_opened(path):
    from stable_baselines3 import PPO

    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").save(path)
    with pytest.raises(
        CheckpointError, match=r"Stable-Baselines3 file.*pickles.*rlxf\.import_sb3\(path, trust=True\)"
    ):
        read_archive(path)


def test_other_zip_file_is_rejected(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")
    assert "not written by rlxf" in read_error(path, path.read_bytes())


def test_zip_without_manifest_is_rejected(path):
    assert "no manifest.json" in read_error(path, sealed_zip([("config.json", JSON)]))


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0])
def test_other_format_version_is_rejected(path, version):
    message = read_error(path, sealed_zip([("manifest.json", manifest_of({}, version=version))]))
    assert f"format version is {version!r}" in message
    assert ("upgrade rlxf" if version == 2 else "use another copy of the file") in message


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]",
        b"{}",
        b"{",
        b"NaN",
        b"[" * 5000,
        manifest_of({}, format="other"),
        manifest_of({}, members=[]),
        manifest_of({}, members={"config.json": 1}),
        manifest_of({}, members={"config.json": {"sha256": "0"}}),
        manifest_of({}, members={"config.json": {"sha256": 0, "size": "2"}}),
    ],
)
def test_malformed_manifest_is_reported(path, manifest):
    message = read_error(path, sealed_zip([("config.json", JSON), ("manifest.json", manifest)]))
    assert "manifest.json" in message or "config.json" in message


# Crafted files


@pytest.mark.parametrize(
    "name",
    [
        "data.pkl",
        "policy.pth",
        "../config.json",
        "/etc/config.json",
        "a/config.json",
        "a\\b.json",
        "..json",
        "a/",
    ],
)
def test_invalid_member_names_are_rejected(path, name):
    assert repr(name) in read_error(path, crafted({name: JSON}))


def test_zip_bomb_is_rejected_before_decompression(path):
    members = {"config.json": bytes(10**7)}
    data = sealed_zip([*members.items(), ("manifest.json", manifest_of(members))], zipfile.ZIP_DEFLATED)
    assert len(data) < 20_000
    assert "compressed" in read_error(path, data)


def test_members_larger_than_the_file_are_rejected(path):
    data = crafted({"config.json": JSON})
    large = data.replace(b"\x02\x00\x00\x00\x02\x00\x00\x00", b"\x00\x00\x00\x70\x00\x00\x00\x70")
    assert large != data
    assert "more bytes than the file has" in read_error(path, reseal(large))


def test_large_directory_is_rejected_before_reading(path):
    data = bytearray(crafted({"config.json": JSON}))
    data[-74:-70] = (2**30).to_bytes(4, "little")
    assert "directory of 1,073,741,824 bytes exceeds" in read_error(path, reseal(bytes(data)))


def test_file_larger_than_max_bytes_is_rejected(path):
    data = write_sample(path)
    assert f"max_bytes={len(data) - 1:,}" in read_error(path, data, max_bytes=len(data) - 1)
    assert read_archive(path, max_bytes=len(data)).documents == DOCUMENTS


@pytest.mark.parametrize(
    "text", [b"{", b"NaN", b'{"a": Infinity}', b"[" * 2000 + b"]" * 2000, b'{"a":1,"a":2}', b"\xff"]
)
def test_invalid_json_is_reported(path, text):
    assert "'config.json' cannot be read" in read_error(path, crafted({"config.json": text}))


def header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        (2**40).to_bytes(8, "little"),
        header("{"),
        header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        header('{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', bytes(8)),
        header('{"a":{"dtype":"PY","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        header('{"a":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}}', bytes(4)),
        header('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', bytes(4)),
        header('{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'),
        header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', bytes(4)),
    ],
)
def test_invalid_safetensors_are_reported(path, data):
    assert "'policy.safetensors' cannot be read" in read_error(path, crafted({"policy.safetensors": data}))


def test_large_safetensors_header_is_rejected_before_parsing(path):
    data = header('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' + " " * 2**23)
    assert "header of 8,388,661 bytes exceeds" in read_error(path, crafted({"policy.safetensors": data}))


def test_large_manifest_is_rejected_before_parsing(path):
    data = sealed_zip([("manifest.json", manifest_of({}) + b" " * 2**23)], zipfile.ZIP_DEFLATED)
    assert "manifest.json of" in read_error(path, data)


# Paths


def test_missing_file_folder_and_pipe_are_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*none\.zip"):
        read_archive(tmp_path / "none.zip")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_archive(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_archive(tmp_path / "pipe")


# No code runs

READ_UNDER_AUDIT = """
import sys
from pathlib import Path
import torch
from rlxf.training import CheckpointError, read_archive

read_archive(Path(sys.argv[1]) / "a.zip")  # Python imports codecs on first use, which runs code
events = []
sys.addaudithook(lambda event, args: events.append(event) if event in AUDITED else None)
AUDITED = {"pickle.find_class", "exec", "compile", "marshal.loads", "os.system", "subprocess.Popen"}
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        read_archive(path)
        print("read", path.name)
    except CheckpointError:
        print("refused", path.name)
seen = list(events)
try:
    torch.load(sys.argv[2], weights_only=False)
except Exception:
    pass
print("reading", seen)
print("control", "pickle.find_class" in events)
"""


@pytest.mark.faults
def test_reading_runs_no_code(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    control = tmp_path / "control.pth"
    torch.save({"weight": torch.nn.Linear(2, 2)}, control)
    write_sample(folder / "a.zip")
    (folder / "b.zip").write_bytes(control.read_bytes())
    (folder / "c.zip").write_bytes(crafted({"policy.pth": control.read_bytes()}))
    (folder / "d.zip").write_bytes(crafted({"policy.safetensors": control.read_bytes()}))
    result = subprocess.run(
        [sys.executable, "-c", READ_UNDER_AUDIT, str(folder), str(control)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert result.stdout.splitlines() == [
        "read a.zip",
        "refused b.zip",
        "refused c.zip",
        "refused d.zip",
        "reading []",
        "control True",
    ]
