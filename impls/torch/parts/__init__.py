"""What the implementations over torch's own strategies stand on: one mechanism a file."""
