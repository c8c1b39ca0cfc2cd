"""What the implementations over FairScale's strategies stand on: one mechanism a file."""
