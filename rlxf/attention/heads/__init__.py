"""Output heads that retrieve neighbors from a datastore. They are attached to a trained transformer."""
