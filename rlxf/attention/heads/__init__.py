"""What reads a memory at the output. Not one of the six questions: it is chosen for a trained transformer."""
