"""Time and memory of a Linformer beside the standard Transformer."""
