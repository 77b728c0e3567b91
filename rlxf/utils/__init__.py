"""Helpers without dependencies on other modules of rlxf."""
