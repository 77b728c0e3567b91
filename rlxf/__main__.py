"""``python -m rlxf``: the command ``rlxf``, where it is not on the path, and under ``torchrun -m``."""

from rlxf.cli import main

if __name__ == "__main__":
    main()
