"""Experiments: several agents on several tasks with several seeds, and their comparison."""
