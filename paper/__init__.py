"""Scripts that reproduce the tables and figures of the Linformer paper, and a few experiments of our own."""
