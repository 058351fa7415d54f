"""Language models: film reviews and the encoder that judges them, a decoder and the corpus it was tuned on."""
