"""The two parts of the demo in `scripts/demo.sh`; not part of the package."""
