"""What every room may import: helpers that know nothing of learning."""
