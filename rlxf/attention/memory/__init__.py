"""Memory of the tokens before a segment."""
