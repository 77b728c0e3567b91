"""The command `rlxf` with your own tasks and techniques.

    python extended_rlxf.py techniques
    python extended_rlxf.py train gtrxl --env examples/Signal-v0 --core.memory.length 16 \\
        --core.pattern log-sparse --core.pattern.reach 16 --total-timesteps 20k --run runs/sparse
    python extended_rlxf.py evaluate runs/sparse

Files never import modules, so `rlxf evaluate runs/sparse` alone does not know the pattern. This program
imports its module first. The commands `experiment` and `sweep` start processes of `rlxf`, which do not import
it, so they refuse the pattern.
"""

import log_sparse  # noqa: F401 - registers the pattern
import signal_task  # noqa: F401 - registers the task

from rlxf.cli import main

if __name__ == "__main__":
    main()
