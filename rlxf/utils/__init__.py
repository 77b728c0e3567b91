"""Helpers that every other package may use; they import nothing of rlxf."""
