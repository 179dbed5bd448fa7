"""The suite as one: one command that shows every domain."""
