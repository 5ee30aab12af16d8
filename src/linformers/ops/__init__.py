"""Fast paths: plain functions of tensors that depend on torch alone and must equal `linformers.reference`."""
