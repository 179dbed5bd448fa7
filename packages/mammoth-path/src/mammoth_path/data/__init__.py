"""Readers: real formats in, typed samples out."""
