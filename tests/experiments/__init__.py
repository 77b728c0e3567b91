"""Tests of `rlxf.experiments`."""
