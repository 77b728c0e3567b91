"""``python -m rlxf``: the command ``rlxf``, where it is not on the path, and under ``torchrun -m``."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python puts the working directory first. A folder there, such as a run named like a package, must
        # not come before what is installed. Modules that --env names are still found.
        sys.path.append(sys.path.pop(0))

    from rlxf.cli import main

    main()
