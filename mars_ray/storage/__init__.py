"""Storage of models, adapters and checkpoints: directories, the Hugging Face hub, object stores."""
