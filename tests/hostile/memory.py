"""Small files that require much memory; each of them is limited by `MAX_MEMORY`."""

from tests.hostile.attack import Attack
from tests.hostile.checkpoints import bytes_of, described, zipped
from tests.hostile.runs import EVALUATE, config

MAX_MEMORY = 200 * 2**20
"""Maximum peak memory of the use of a malicious file, in addition to that of the process before."""
ATTACKS: dict[str, Attack] = {
    "long corridor": config(
        "gtrxl", EVALUATE, "must be at most", env="rlxf/TMaze-v0", env_kwargs={"corridor_length": 10**9}
    ),
    "wide layers": described("gtrxl", ("settings", "core", "width"), 10**7, ""),
    "many layers": described("dt", ("settings", "core", "layers"), 10**7, ""),
    "many members": zipped(
        lambda file: [file.writestr(f"x{number}.json", "{}") for number in range(5000)] and None, ""
    ),
    "nothing but zeros": bytes_of(lambda: bytes(10**6), "it is not a zip file"),
}
"""Attacks by name."""
