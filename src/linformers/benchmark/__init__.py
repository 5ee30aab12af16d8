"""Time and memory of a Linformer beside Transformers of the same size."""
