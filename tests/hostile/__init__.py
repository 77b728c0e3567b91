"""Malicious files, and a process that reads them under an audit hook."""
