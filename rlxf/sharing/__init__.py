"""Sharing of trained agents in repositories of the Hugging Face Hub: model cards, uploads and downloads."""
