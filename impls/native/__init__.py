"""Our own implementations of the parallel strategies."""
