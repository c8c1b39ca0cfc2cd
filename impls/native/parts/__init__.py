"""The mechanisms the native implementations are composed of, one a file."""
