"""Export of trained agents as files that other programs run."""
