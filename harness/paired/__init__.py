"""Two builds timed in turns: two revisions, or one revision beside two versions of a peer."""
