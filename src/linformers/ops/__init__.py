"""What the layers compute with: plain functions of tensors, which know torch and nothing of the model."""
