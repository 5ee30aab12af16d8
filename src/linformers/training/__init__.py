"""From raw text to a fine-tuned model: corpora, recipes, pretraining, fine-tuning, and checkpoints that lose nothing."""
