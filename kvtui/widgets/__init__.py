"""The panels, one a file."""
