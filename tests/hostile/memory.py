"""Small files that ask for much memory. Add what a file could ask for: `MOST` bounds each of them."""

from tests.hostile.attack import Attack
from tests.hostile.checkpoints import bytes_of, described, zipped
from tests.hostile.runs import EVALUATE, config

MOST = 200 * 2**20
"""Bytes that the use of a hostile file may take at its peak, beyond those of the process before."""
ATTACKS: dict[str, Attack] = {
    "long corridor": config(
        "gtrxl", EVALUATE, "must be at most", env="rlxf/TMaze-v0", env_kwargs={"corridor_length": 10**9}
    ),
    "wide layers": described("gtrxl", ("settings", "core", "width"), 10**7, ""),
    "many layers": described("dt", ("settings", "core", "layers"), 10**7, ""),
    "many members": zipped(
        lambda file: [file.writestr(f"x{number}.json", "{}") for number in range(5000)] and None, ""
    ),
    "nothing but zeros": bytes_of(lambda: bytes(10**6), "it is no zip file"),
}
"""By name."""
