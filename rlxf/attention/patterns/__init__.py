"""Attention patterns: which keys a query may attend to."""
