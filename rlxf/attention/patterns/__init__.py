"""Attention patterns: which keys a query may see."""
