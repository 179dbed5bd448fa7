"""The hot functions, each one custom op with a reference and faster implementations."""
