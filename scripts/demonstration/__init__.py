"""The two halves of the demonstration that `scripts/demo.sh` runs; not part of the package."""
