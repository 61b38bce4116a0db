"""A model's own answers to prompts, of which it may write some itself: data for training."""
