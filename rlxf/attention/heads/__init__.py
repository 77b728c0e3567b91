"""Output heads that retrieve neighbours from a datastore. They are attached to a trained transformer."""
