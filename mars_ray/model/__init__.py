"""Hugging Face models: create, load, save, the mask token, the one forward call."""
