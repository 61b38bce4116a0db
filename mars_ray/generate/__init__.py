"""A model's own answers as training data, to prompts of which it may write some itself."""
