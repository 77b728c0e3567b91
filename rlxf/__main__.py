"""Entry point of ``python -m rlxf`` and ``torchrun -m rlxf``: runs the command ``rlxf``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python puts the working directory first in sys.path. A folder there, such as a run with the name of
        # a package, would shadow installed packages. At the end, modules that --env names are still found.
        sys.path.append(sys.path.pop(0))

    from rlxf.cli import main

    main()
