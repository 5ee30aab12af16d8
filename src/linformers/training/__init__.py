"""From raw text to a trained model: prepare a corpus, pretrain, fine-tune, predict."""
