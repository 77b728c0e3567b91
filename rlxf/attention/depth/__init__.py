"""Depth: how many layers process a token."""
