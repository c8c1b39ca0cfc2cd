"""torch's own implementations, as their best users run them."""
