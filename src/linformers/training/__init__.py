"""From raw text to a fine-tuned model: corpora, recipes, pretraining, fine-tuning, checkpoints that lose nothing."""
