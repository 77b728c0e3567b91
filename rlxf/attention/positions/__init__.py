"""Position encodings: how the order of tokens enters attention."""
