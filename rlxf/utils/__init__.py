"""Helpers without knowledge of agents, environments or files."""
