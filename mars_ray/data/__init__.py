"""From a source of conversations to batches of token rows."""
