"""What DeepSpeed needs told."""
